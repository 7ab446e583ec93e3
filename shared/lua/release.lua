#!lua flags=allow-oom
-- release: a worker that drains, or lost a pull's reply, gives requests back. Costs them no attempt.
-- ARGV: owner, then per request: rid epoch ('' = whatever it is). Replies how many were given back.
local given = 0
for i = 2, #ARGV, 2 do
  local h = load(ARGV[i])
  if h and h.st == 'run' and h.ow == ARGV[1] and (ARGV[i + 1] == '' or h.ep == ARGV[i + 1]) then
    requeue(ARGV[i], h)
    given = given + 1
  end
end
return given
