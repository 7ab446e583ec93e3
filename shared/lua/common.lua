-- Put before every script. KEYS[1] is the shard's prefix `hr:{s}:`; every other key is built from it, in the same slot.
local P = KEYS[1]
local GROUP = 'workers'

local function clock_ms()
  local t = redis.call('TIME')
  return t[1] * 1000 + math.floor(t[2] / 1000)
end

local function count(what, by)
  redis.call('HINCRBY', P .. 'count', what, by or 1)
end

-- How many requests of a lane leave its queue for workers, a second: each counts for about this long, less and less.
local TAKEN_MS = 30000

local function taken_per_s(depth, lane, now)
  local f = redis.call('HMGET', depth, 'taken:' .. lane, 'taken_at:' .. lane)
  if not f[1] then return 0 end
  return f[1] * math.exp((f[2] - now) / TAKEN_MS)
end

-- A request's hash as a table; nil when there is none.
local function load(rid)
  local flat = redis.call('HGETALL', P .. 'r:' .. rid)
  if #flat == 0 then return nil end
  local h = {}
  for i = 1, #flat, 2 do h[flat[i]] = flat[i + 1] end
  return h
end

-- Tell the detokenizer of this shard what has come, a line each: `decode_news` in token_stream.py.
local function wake(news)
  redis.call('PUBLISH', P .. 'wake', news)
end

-- The earliest time at which somebody must look at a request again.
local function due(h, now)
  local at = tonumber(h.dl)
  if h.rd ~= '' and tonumber(h.rd) < at then at = tonumber(h.rd) end
  if h.st == 'run' and tonumber(h.lu) < at then at = tonumber(h.lu) end
  if at <= now then at = now + 1000 end
  return at
end

-- Take a request out of the workers' stream. The entry is acknowledged and deleted here and nowhere else.
local function drop_job(h)
  if h.jid == '' then return end
  local jobs = P .. 'jobs:' .. h.pl .. ':' .. h.ln
  redis.call('XACK', jobs, GROUP, h.jid)
  redis.call('XDEL', jobs, h.jid)
end

-- A request whose next death is its last (see `lost` in sweep.lua) waits apart: a worker runs it beside no other that
-- could be charged for its death.
local SUSPECT_AT = 2

local function queue_of(h)
  if tonumber(h.att) >= SUSPECT_AT then return P .. 'sq:' .. h.pl end
  return P .. 'tq:' .. h.pl .. ':' .. h.ln .. ':' .. h.tn
end

-- Let a request wait for a worker. `front`: it has waited before and goes first.
local function enqueue(rid, h, front)
  local vtimes, depth = P .. 'tv:' .. h.pl .. ':' .. h.ln, P .. 'depth:' .. h.pl
  redis.call(front and 'LPUSH' or 'RPUSH', queue_of(h), rid)
  redis.call('HINCRBY', depth, h.ln, 1)
  if tonumber(h.att) < SUSPECT_AT and not redis.call('ZSCORE', vtimes, h.tn) then
    -- A tenant that comes back starts at the present virtual time: idling earns no credit.
    redis.call('ZADD', vtimes, redis.call('HGET', depth, 'clock:' .. h.ln) or 0, h.tn)
  end
  redis.call('XADD', P .. 'new:' .. h.pl, 'MAXLEN', '~', 16, '*', 'l', h.ln)
end

local function dequeue(rid, h)
  if redis.call('LREM', queue_of(h), 1, rid) > 0 then
    redis.call('HINCRBY', P .. 'depth:' .. h.pl, h.ln, -1)
  end
end

-- End the generation of a request: its end marker goes behind its tokens, and the detokenizer does the rest.
local function finish(rid, h, fin, prompt)
  local entry = {'fin', fin}
  if prompt and prompt ~= '' then entry[3] = 'pl' entry[4] = prompt end
  redis.call('XADD', P .. 't:' .. rid, h.n .. '-1', unpack(entry))
  drop_job(h)
  redis.call('HSET', P .. 'r:' .. rid, 'st', 'gd', 'jid', '', 'ow', '')
  wake(rid)
end

-- Give a request back to the queue; what it has published stays and is continued. A cancelled one ends instead, for
-- there may be no worker left that would.
local function requeue(rid, h)
  if h.cx ~= '' then return finish(rid, h, h.cx) end
  drop_job(h)
  redis.call('HSET', P .. 'r:' .. rid, 'st', 'q', 'jid', '', 'ow', '', 'lu', 0)
  enqueue(rid, h, true)
end
