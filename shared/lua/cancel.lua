#!lua flags=allow-oom
-- cancel: end requests. A waiting one ends here; a running one with its worker's next append.
-- ARGV: finish rid…   Replies how many were still generating.
local hit = 0
for i = 2, #ARGV do
  local h = load(ARGV[i])
  if h and h.st == 'q' then
    dequeue(ARGV[i], h)
    finish(ARGV[i], h, ARGV[1])
    hit = hit + 1
  elseif h and h.st == 'run' then
    if h.cx == '' then redis.call('HSET', P .. 'r:' .. ARGV[i], 'cx', ARGV[1]) end
    hit = hit + 1
  end
end
return hit
