#!lua flags=allow-oom
-- sweep: look at what is due: lost workers, gone readers, passed deadlines; and keep finished text within its budget.
-- ARGV: limit reclaim('1': leases may be judged) max_attempts text_budget_bytes
-- Replies how many requests were looked at (when it equals `limit` there may be more), then of each that something was
--   done about: rid, `lost` `dead` `expired` `unread`, owner.
local now, limit, max_attempts = clock_ms(), tonumber(ARGV[1]), tonumber(ARGV[3])
local done = {}

local function note(rid, what, owner)
  done[#done + 1] = rid
  done[#done + 1] = what
  done[#done + 1] = owner
end

local function lost(rid, h)
  if h.cx ~= '' then return requeue(rid, h) end
  -- The worker said nothing for a lease. Only a claim that made no token is held against the request.
  local attempts = h.n == h.cn and h.att + 1 or 0
  h.att = attempts
  redis.call('HSET', P .. 'r:' .. rid, 'att', attempts)
  if attempts >= max_attempts then
    count('dead')
    note(rid, 'dead', h.ow)
    redis.call('XADD', P .. 'dead', 'MAXLEN', '~', 1000, '*', 'r', rid, 'att', attempts, 'ow', h.ow)
    finish(rid, h, '{"type":"error","status":500,"message":"The request ended its worker ' .. attempts
      .. ' times and was given up."}')
  else
    count('retries')
    note(rid, 'lost', h.ow)
    requeue(rid, h)
  end
end

local function look(rid)
  local h = load(rid)
  if not h or h.st == 'done' then return redis.call('ZREM', P .. 'act', rid) end
  local reason, what
  if h.rd ~= '' and tonumber(h.rd) <= now then
    reason, what = '{"type":"abort","message":"The client went away."}', 'unread'
  elseif tonumber(h.dl) <= now then
    reason, what = '{"type":"error","status":504,"message":"The request passed its deadline."}', 'expired'
  end
  if reason and h.st == 'q' then
    count(what)
    note(rid, what, '')
    dequeue(rid, h)
    finish(rid, h, reason)
  elseif reason and h.st == 'run' and h.cx == '' then
    count(what)
    note(rid, what, h.ow)
    h.cx = reason
    redis.call('HSET', P .. 'r:' .. rid, 'cx', reason)
  elseif h.st == 'gd' then
    wake(rid)
  end
  if h.st == 'run' and tonumber(h.lu) <= now and ARGV[2] == '1' then lost(rid, h) end
  redis.call('ZADD', P .. 'act', due(h, now), rid)
end

local rids = redis.call('ZRANGEBYSCORE', P .. 'act', '-inf', now, 'LIMIT', 0, limit)
for _, rid in ipairs(rids) do look(rid) end

-- Members of `fin` are '<rid> <bytes>', by the time at which Redis drops the text of itself; over the budget it goes earlier.
local function forget(member)
  local rid, bytes = string.match(member, '^(%S+) (%d+)$')
  redis.call('ZREM', P .. 'fin', member)
  redis.call('DECRBY', P .. 'finb', bytes)
  redis.call('UNLINK', P .. 'r:' .. rid, P .. 'x:' .. rid)
end
for _, member in ipairs(redis.call('ZRANGEBYSCORE', P .. 'fin', '-inf', now, 'LIMIT', 0, limit)) do forget(member) end
if tonumber(redis.call('GET', P .. 'finb') or 0) > tonumber(ARGV[4]) then
  for _, member in ipairs(redis.call('ZRANGE', P .. 'fin', 0, 99)) do
    if tonumber(redis.call('GET', P .. 'finb')) > tonumber(ARGV[4]) then forget(member) end
  end
end
return {#rids, unpack(done)}
