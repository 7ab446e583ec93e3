#!lua flags=allow-oom
-- append: tokens of one step, for all requests of one worker in this shard; with no token it only renews the lease.
-- ARGV: owner lease_ms, then per request: rid epoch from count ids logprobs|'' cached|'' prompt|''
--   weights|'' finish|''
--   prompt: logprobs of the prompt's tokens, with the first tokens or, where none are generated, with the finish
-- Replies one number per request:
--   1 written, or was before · 2 cancelled: forget it · -1 fenced: another owns it · -2 ended or gone · -3 wrong position
local owner, lease, now = ARGV[1], tonumber(ARGV[2]), clock_ms()
local out, news = {}, {}

-- What the detokenizer must know of an entry, so that it need not read it; but for what comes once in a request.
local function line(rid, from, ids, logprobs, rest)
  return rest == '' and rid .. ' ' .. from .. ' ' .. ids .. ' ' .. logprobs or rid
end

local function write(rid, h, from, added, ids, logprobs, cached, prompt, weights)
  local to = from + added
  local entry = {'t', ids}
  if logprobs ~= '' then entry[#entry + 1] = 'lp' entry[#entry + 1] = logprobs end
  if cached ~= '' then entry[#entry + 1] = 'ct' entry[#entry + 1] = cached end
  if prompt ~= '' then entry[#entry + 1] = 'pl' entry[#entry + 1] = prompt end
  if weights ~= '' then entry[#entry + 1] = 'wv' entry[#entry + 1] = weights end
  redis.call('XADD', P .. 't:' .. rid, to .. '-0', unpack(entry))
  h.n = to
end

-- The tenant was charged for the tokens that it was expected to take: now it is known how many it took.
local function settle(h, tenant, expected)
  if not expected then return end
  redis.call('ZADD', P .. 'tv:' .. h.pl .. ':' .. h.ln, 'XX', 'INCR', h.n - expected, tenant)
end

local function one(i)
  local rid, from, added, fin = ARGV[i], tonumber(ARGV[i + 2]), tonumber(ARGV[i + 3]), ARGV[i + 9]
  local key = P .. 'r:' .. rid
  local f = redis.call('HMGET', key, 'st', 'ep', 'ow', 'n', 'cx', 'jid', 'pl', 'ln', 'tn', 'ex')
  local h = {st = f[1], n = f[4], cx = f[5], jid = f[6], pl = f[7], ln = f[8]}
  if not h.st or h.st == 'done' then return -2 end
  if f[2] ~= ARGV[i + 1] then count('fenced') return -1 end
  if h.st == 'gd' then return from + added <= tonumber(h.n) and 1 or -2 end
  if h.st ~= 'run' or f[3] ~= owner then count('fenced') return -1 end
  local n = tonumber(h.n)
  if from > n or (from < n and from + added > n) then return -3 end
  if from + added > n then
    write(rid, h, from, added, ARGV[i + 4], ARGV[i + 5], ARGV[i + 6], ARGV[i + 7], ARGV[i + 8])
  end
  if fin == '' and h.cx ~= '' then fin = h.cx end
  if fin == '' then
    if from + added > n then
      news[#news + 1] = line(rid, ARGV[i + 2], ARGV[i + 4], ARGV[i + 5], ARGV[i + 6] .. ARGV[i + 7] .. ARGV[i + 8])
    end
    redis.call('HSET', key, 'n', h.n, 'lu', now + lease)
    return 1
  end
  redis.call('HSET', key, 'n', h.n)
  finish(rid, h, fin, added == 0 and ARGV[i + 7] or '')
  settle(h, f[9], f[10])
  return fin == ARGV[i + 9] and 1 or 2
end

for i = 3, #ARGV, 10 do out[#out + 1] = one(i) end
if #news > 0 then wake(table.concat(news, '\n')) end
return out
