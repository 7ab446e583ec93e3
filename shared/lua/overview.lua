#!lua flags=no-writes
-- overview: how this shard stands, for metrics and `headrace top`. ARGV: pool…
-- Replies {counters (flat), unfinished, overdue ms, dead letters, bytes of finished text, ms since the lease of the shard
--   ran out ('' while it is leased, or never was), owner, then per pool: {per lane: waiting, running, age ms of the oldest
--   that waits ('' when none does), taken a second}}
local now = clock_ms()

local function age(rid)
  local at = rid and redis.call('HGET', P .. 'r:' .. rid, 'at')
  return at and now - at
end

-- The head of each tenant's list is its oldest, but for what was given back out of order: near enough for a picture.
local function oldest(pool, lane)
  local eldest
  for _, tenant in ipairs(redis.call('ZRANGE', P .. 'tv:' .. pool .. ':' .. lane, 0, 999)) do
    local waited = age(redis.call('LINDEX', P .. 'tq:' .. pool .. ':' .. lane .. ':' .. tenant, 0))
    if waited and (not eldest or waited > eldest) then eldest = waited end
  end
  local suspect = redis.call('LINDEX', P .. 'sq:' .. pool, 0)
  if suspect and redis.call('HGET', P .. 'r:' .. suspect, 'ln') == lane then
    local waited = age(suspect)
    if waited and (not eldest or waited > eldest) then eldest = waited end
  end
  return eldest or ''
end

local function lanes(pool)
  local depth, out = P .. 'depth:' .. pool, {}
  for _, lane in ipairs({'rt', 'std', 'batch'}) do
    out[#out + 1] = {
      tonumber(redis.call('HGET', depth, lane) or 0),
      redis.call('XLEN', P .. 'jobs:' .. pool .. ':' .. lane),
      oldest(pool, lane),
      tostring(taken_per_s(depth, lane, now)),
    }
  end
  return out
end

local act, lease = redis.call('ZRANGE', P .. 'act', 0, 0, 'WITHSCORES'), redis.call('HMGET', P .. 'lease', 'owner', 'until')
local free = tonumber(lease[2] or 0) > 0 and now - lease[2]
local out = {
  redis.call('HGETALL', P .. 'count'),
  redis.call('ZCARD', P .. 'act'),
  act[2] and math.max(0, now - act[2]) or 0,
  redis.call('XLEN', P .. 'dead'),
  tonumber(redis.call('GET', P .. 'finb') or 0),
  free and free > 0 and free or '',
  lease[1] or '',
}
for _, pool in ipairs(ARGV) do out[#out + 1] = lanes(pool) end
return out
