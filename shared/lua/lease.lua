#!lua flags=allow-oom
-- lease: take or keep this shard for a detokenizer. ARGV: owner lease_ms ('0' gives it up)
-- Replies the epoch of the owner's lease, or 0.
local key, now = P .. 'lease', clock_ms()
local l = redis.call('HMGET', key, 'owner', 'epoch', 'until')
if ARGV[2] == '0' then
  if l[1] == ARGV[1] then redis.call('HSET', key, 'owner', '', 'until', now) end
  return 0
end
if l[1] == ARGV[1] then
  redis.call('HSET', key, 'until', now + ARGV[2])
  return tonumber(l[2])
end
if l[3] and tonumber(l[3]) > now then return 0 end
local epoch = redis.call('HINCRBY', key, 'epoch', 1)
redis.call('HSET', key, 'owner', ARGV[1], 'until', now + ARGV[2])
return epoch
