-- submit: accept a family of choices, once. No allow-oom: a full store refuses at the door.
-- ARGV: family n pool lane tenant deadline_ms reader_ms|'' keep_ms reader cost seed max_lane max_tenant decode_params body
--   plan|'': kept with choice 0; expected: the output tokens among the cost
-- Replies {'ok'} (also when it was accepted before), or {'full', waiting, taken a second}: of the lane, or of the tenant,
--   which shares the lane's rate with those that wait beside it.
local family, n, now = ARGV[1], tonumber(ARGV[2]), clock_ms()
if redis.call('EXISTS', P .. 'r:' .. family .. '.0') == 1 then return {'ok'} end

local pool, lane, tenant = ARGV[3], ARGV[4], ARGV[5]
local depth = P .. 'depth:' .. pool
local function full(waiting, sharing)
  count('refused')
  return {'full', waiting, tostring(taken_per_s(depth, lane, now) / sharing)}
end
local waiting = tonumber(redis.call('HGET', depth, lane) or 0)
if waiting + n > tonumber(ARGV[12]) then return full(waiting, 1) end
local own = redis.call('LLEN', P .. 'tq:' .. pool .. ':' .. lane .. ':' .. tenant)
if own + n > tonumber(ARGV[13]) then return full(own, math.max(1, redis.call('ZCARD', P .. 'tv:' .. pool .. ':' .. lane))) end

redis.call('HSET', P .. 'b:' .. family, 'body', ARGV[15], 'left', n)
for i = 0, n - 1 do
  local rid = family .. '.' .. i
  local h = {pl = pool, ln = lane, tn = tenant, st = 'q', att = 0, lu = 0, dl = now + ARGV[6],
             rd = ARGV[7] ~= '' and now + ARGV[7] or ''}
  redis.call('HSET', P .. 'r:' .. rid, 'v', 1, 'st', 'q', 'n', 0, 'c', 0, 'o', 0, 'xk', 0, 'ep', 0, 'ow', '', 'lu', 0,
    'cn', 0, 'att', 0, 'jid', '', 'cx', '', 'dl', h.dl, 'pl', pool, 'ln', lane, 'tn', tenant, 'ct', ARGV[10], 'ex', ARGV[17],
    'sd', ARGV[11] + i, 'at', now, 'rd', h.rd, 'to', ARGV[9], 'kp', ARGV[8], 'dc', ARGV[14], 'ds', '')
  redis.call('ZADD', P .. 'act', due(h, now), rid)
  enqueue(rid, h, false)
end
if ARGV[16] ~= '' then redis.call('HSET', P .. 'r:' .. family .. '.0', 'an', ARGV[16]) end
count('submitted', n)
return {'ok'}
