#!lua flags=allow-oom
-- pull: choose lane and tenant now, when there is room, hand over and claim.
-- ARGV: pool owner consumer slots lease_ms lane…      (the lane `suspect` holds those whose next death is their last)
-- Replies a list of {rid, epoch, tokens published, attempts, seed, body}.
local pool, owner, consumer, slots = ARGV[1], ARGV[2], ARGV[3], tonumber(ARGV[4])
local now, out, taken = clock_ms(), {}, {}

local function next_suspect()
  while true do
    local rid = redis.call('LPOP', P .. 'sq:' .. pool)
    if not rid then return nil end
    local h = load(rid)
    if h and h.st == 'q' then
      redis.call('HINCRBY', P .. 'depth:' .. pool, h.ln, -1)
      return rid, h
    end
  end
end

local function next_waiting(lane)
  if lane == 'suspect' then return next_suspect() end
  local vtimes, depth = P .. 'tv:' .. pool .. ':' .. lane, P .. 'depth:' .. pool
  while true do
    local first = redis.call('ZRANGE', vtimes, 0, 0, 'WITHSCORES')
    if #first == 0 then return nil end
    local tenant, vtime = first[1], first[2]
    local rid = redis.call('LPOP', P .. 'tq:' .. pool .. ':' .. lane .. ':' .. tenant)
    if not rid then
      redis.call('ZREM', vtimes, tenant)
    else
      redis.call('HINCRBY', depth, lane, -1)
      redis.call('HSET', depth, 'clock:' .. lane, vtime)
      local h = load(rid)
      if h and h.st == 'q' then
        -- Once: what another worker's death costs is not the tenant's.
        if tonumber(h.ep) == 0 then redis.call('ZINCRBY', vtimes, h.ct, tenant) end
        return rid, h
      end
    end
  end
end

local function claim(rid, h, body)
  local jobs = P .. 'jobs:' .. pool .. ':' .. h.ln
  redis.pcall('XGROUP', 'CREATE', jobs, GROUP, '0', 'MKSTREAM')
  local jid = redis.call('XADD', jobs, '*', 'r', rid)
  redis.call('XREADGROUP', 'GROUP', GROUP, consumer, 'COUNT', 1, 'STREAMS', jobs, '>')
  local epoch = h.ep + 1
  h.st, h.lu = 'run', now + ARGV[5]
  redis.call('HSET', P .. 'r:' .. rid, 'st', 'run', 'ep', epoch, 'ow', owner, 'lu', h.lu, 'cn', h.n, 'jid', jid)
  redis.call('ZADD', P .. 'act', due(h, now), rid)
  if epoch > 1 then count('takeovers') end
  out[#out + 1] = {rid, epoch, tonumber(h.n), tonumber(h.att), tonumber(h.sd), body}
end

for i = 6, #ARGV do
  while #out < slots do
    local rid, h = next_waiting(ARGV[i])
    if not rid then break end
    taken[h.ln] = (taken[h.ln] or 0) + 1
    local body = redis.call('HGET', P .. 'b:' .. string.match(rid, '^(.*)%.'), 'body')
    if h.cx ~= '' then
      finish(rid, h, h.cx)
    elseif tonumber(h.dl) <= now then
      count('expired')
      finish(rid, h, '{"type":"error","status":504,"message":"The request waited past its deadline."}')
    elseif not body then
      finish(rid, h, '{"type":"error","status":500,"message":"The request body was lost; send it again."}')
    else
      claim(rid, h, body)
    end
  end
end
for lane, n in pairs(taken) do
  local depth = P .. 'depth:' .. pool
  local rate = taken_per_s(depth, lane, now) + n * 1000 / TAKEN_MS
  redis.call('HSET', depth, 'taken:' .. lane, tostring(rate), 'taken_at:' .. lane, now)
end
return out
