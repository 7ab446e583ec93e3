-- submit: accept a family of choices, once. No allow-oom: a full store refuses at the door.
-- ARGV: family n pool lane tenant deadline_ms reader_ms|'' keep_ms reader cost seed max_lane max_tenant decode_params body
--   plan|'': kept with choice 0
-- Replies {'ok'} (also when it was accepted before), or {'full', waiting}.
local family, n, now = ARGV[1], tonumber(ARGV[2]), clock_ms()
if redis.call('EXISTS', P .. 'r:' .. family .. '.0') == 1 then return {'ok'} end

local pool, lane, tenant = ARGV[3], ARGV[4], ARGV[5]
local waiting = tonumber(redis.call('HGET', P .. 'depth:' .. pool, lane) or 0)
if waiting + n > tonumber(ARGV[12]) then count('refused') return {'full', waiting} end
local own = redis.call('LLEN', P .. 'tq:' .. pool .. ':' .. lane .. ':' .. tenant)
if own + n > tonumber(ARGV[13]) then count('refused') return {'full', own} end

redis.call('HSET', P .. 'b:' .. family, 'body', ARGV[15], 'left', n)
for i = 0, n - 1 do
  local rid = family .. '.' .. i
  local h = {pl = pool, ln = lane, tn = tenant, st = 'q', att = 0, lu = 0, dl = now + ARGV[6],
             rd = ARGV[7] ~= '' and now + ARGV[7] or ''}
  redis.call('HSET', P .. 'r:' .. rid, 'v', 1, 'st', 'q', 'n', 0, 'c', 0, 'o', 0, 'xk', 0, 'ep', 0, 'ow', '', 'lu', 0,
    'cn', 0, 'att', 0, 'jid', '', 'cx', '', 'dl', h.dl, 'pl', pool, 'ln', lane, 'tn', tenant, 'ct', ARGV[10],
    'sd', ARGV[11] + i, 'rd', h.rd, 'to', ARGV[9], 'kp', ARGV[8], 'dc', ARGV[14], 'ds', '')
  redis.call('ZADD', P .. 'act', due(h, now), rid)
  enqueue(rid, h, false)
end
if ARGV[16] ~= '' then redis.call('HSET', P .. 'r:' .. family .. '.0', 'an', ARGV[16]) end
count('submitted', n)
return {'ok'}
