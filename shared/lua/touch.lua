#!lua flags=allow-oom
-- touch: a reader says that it still reads; the last one to come gets the pushes.
-- ARGV: reader_ms|'' reader mine('1': only what is still pushed to this reader) rid…   Replies 1 per request that is there (text may still be read), else 0.
local now, out = clock_ms(), {}
for i = 4, #ARGV do
  local key = P .. 'r:' .. ARGV[i]
  local st, to = unpack(redis.call('HMGET', key, 'st', 'to'))
  out[#out + 1] = st and 1 or 0
  if st and st ~= 'done' and (ARGV[3] ~= '1' or to == ARGV[2]) then
    redis.call('HSET', key, 'to', ARGV[2], 'rd', ARGV[1] ~= '' and now + ARGV[1] or '')
    if ARGV[1] ~= '' then redis.call('ZADD', P .. 'act', 'LT', now + ARGV[1], ARGV[i]) end
  end
end
return out
