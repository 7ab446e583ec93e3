#!lua flags=allow-oom
-- publish: text of requests of this shard, by the detokenizer that leases it.
-- ARGV: owner epoch, then per request: rid c_before c_after o_before text meta state visible end
--   visible '1': text, ids or logprobs for a reader; end '1': the last chunk of this choice
-- Replies one number per request: 1 published · -1 shard lost · -2 done or gone · -3 wrong position
local now, out = clock_ms(), {}
local l = redis.call('HMGET', P .. 'lease', 'owner', 'epoch')
local mine = l[1] == ARGV[1] and l[2] == ARGV[2]
if not mine then count('fenced') end

local function done(rid, h, o)
  drop_job(h)
  if h.st == 'q' then dequeue(rid, h) end
  local key, family = P .. 'r:' .. rid, string.match(rid, '^(.*)%.')
  redis.call('HSET', key, 'st', 'done', 'jid', '', 'ow', '')
  redis.call('HDEL', key, 'dc', 'ds', 'cx')
  redis.call('UNLINK', P .. 't:' .. rid)
  redis.call('ZREM', P .. 'act', rid)
  redis.call('PEXPIRE', key, h.kp)
  redis.call('PEXPIRE', P .. 'x:' .. rid, h.kp)
  -- A request costs the budget its text and about a kilobyte of bookkeeping.
  local bytes = o + 1024
  redis.call('ZADD', P .. 'fin', now + h.kp, rid .. ' ' .. string.format('%d', bytes))
  redis.call('INCRBY', P .. 'finb', bytes)
  if redis.call('HINCRBY', P .. 'b:' .. family, 'left', -1) <= 0 then redis.call('UNLINK', P .. 'b:' .. family) end
  count('done')
end

local function one(i)
  local rid, text, meta = ARGV[i], ARGV[i + 4], ARGV[i + 5]
  local key = P .. 'r:' .. rid
  local f = redis.call('HMGET', key, 'st', 'c', 'o', 'xk', 'to', 'jid', 'pl', 'ln', 'tn', 'kp', 'att')
  if not f[1] or f[1] == 'done' then return -2 end
  if f[2] ~= ARGV[i + 1] or f[3] ~= ARGV[i + 3] then return -3 end
  local before, xk = f[3], f[4]
  local o = before + #text
  if ARGV[i + 7] == '1' then
    local seq = #text > 0 and 1 or xk + 1
    redis.call('XADD', P .. 'x:' .. rid, o .. '-' .. seq, 'd', text, 'm', meta)
    if f[5] ~= '' then
      local head = rid .. ' ' .. before .. ' ' .. xk .. ' ' .. seq .. ' ' .. #meta .. '\n'
      redis.call('PUBLISH', P .. 'n:' .. f[5], head .. meta .. text)
    end
    xk = seq
  end
  redis.call('HSET', key, 'c', ARGV[i + 2], 'o', o, 'xk', xk, 'ds', ARGV[i + 6])
  if ARGV[i + 8] == '1' then
    done(rid, {st = f[1], jid = f[6], pl = f[7], ln = f[8], tn = f[9], kp = f[10], att = f[11]}, o)
  end
  return 1
end

for i = 3, #ARGV, 9 do out[#out + 1] = mine and one(i) or -1 end
return out
