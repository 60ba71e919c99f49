-- Shared by all scripts: each is sent as this text followed by sharing.lua and its own.
-- KEYS[1] is the shard's tag, {PREFIX:SHARD}; every key is built from it and so lies in its slot.
local P = KEYS[1]
local LEVELS = 3
-- Replies up to this many bytes travel in the inbox itself; larger ones are fetched by rid.
local INLINE_BYTES = 65536
-- A doorbell never holds more tokens than this; whoever claims and leaves work rings on.
local BELL_TOKENS = 16
-- The newest dead letters that are kept for people to look at.
local DEAD_LETTERS = 10000
-- A warm worker that waits comes for its promise within milliseconds, over any network. Who has not
-- come by then is dead or stuck, and others take what it was promised.
local STEAL_MS = 100
local call = redis.call

local function now_ms()
  local t = call('TIME')
  return t[1] * 1000 + math.floor(t[2] / 1000)
end

local function ring_bell(lane, count)
  local bell = P .. ':bell:' .. lane
  local missing = math.min(count, BELL_TOKENS) - call('LLEN', bell)
  for _ = 1, missing do call('RPUSH', bell, '1') end
end

-- Tells clients that requests ended: one stream entry per client and call.
-- told: client -> {rid, reply, rid, reply, ...}
local function tell(told, ttl_ms)
  for client, fields in pairs(told) do
    local inbox = P .. ':inbox:' .. client
    call('XADD', inbox, '*', unpack(fields))
    call('PEXPIRE', inbox, ttl_ms)
  end
end

-- The reply under its own key, and its client told.
local function answer(rid, client, reply, ttl_ms, told)
  call('SET', P .. ':reply:' .. rid, reply, 'PX', ttl_ms)
  local fields = told[client]
  if not fields then fields = {}; told[client] = fields end
  fields[#fields + 1] = rid
  fields[#fields + 1] = #reply <= INLINE_BYTES and reply or ''
  -- Lua's unpack ends near 8,000 values.
  if #fields >= 4000 then tell({[client] = fields}, ttl_ms); told[client] = nil end
end

local function forget_request(rid)
  call('UNLINK', P .. ':req:' .. rid, P .. ':body:' .. rid)
end

-- Ends a request.
local function finish(rid, client, reply, ttl_ms, told)
  forget_request(rid)
  answer(rid, client, reply, ttl_ms, told)
end

-- The reply that a script itself gives, in the wire format of version 1.
local function verdict_reply(verdict, attempts, queued_ms)
  return cmsgpack.pack({'', 1, {verdict = verdict, attempts = attempts, queued_s = queued_ms / 1000}})
end

-- The last attempt runs alone, so that the neighbours of a killer are not condemned with it.
local function is_suspect(attempts, max_attempts)
  return attempts > 0 and attempts == max_attempts - 1
end

-- Puts one request that was leased or attached back to the front, or makes it a dead letter.
-- charge: whether the attempt counts. defer: to the end of its line instead.
-- Returns 'queued', 'poisoned' or 'lost', its lane and its digest.
local function put_back(rid, charge, max_attempts, now, ttl_ms, told, defer)
  local key = P .. ':req:' .. rid
  local r = call('HMGET', key, 'l', 'p', 't', 'n', 'c', 'd')
  local lane, n = r[1], tonumber(r[4])
  -- Somebody deleted it, perhaps the server to make room; its client will send it again.
  if not lane then return 'lost' end
  if r[5] == '' then
    -- It has its reply, and ran for its followers alone.
    forget_request(rid)
    return 'lost', lane, r[6]
  end
  if not charge then n = n - 1 end
  if n >= max_attempts then
    call('COPY', key, P .. ':deadreq:' .. rid, 'REPLACE')
    call('HSET', P .. ':deadreq:' .. rid, 'body', call('GET', P .. ':body:' .. rid) or '')
    call('ZADD', P .. ':dead', now, rid)
    local surplus = call('ZCARD', P .. ':dead') - DEAD_LETTERS
    if surplus > 0 then
      local oldest = call('ZPOPMIN', P .. ':dead', surplus)
      for i = 1, #oldest, 2 do call('UNLINK', P .. ':deadreq:' .. oldest[i]) end
    end
    finish(rid, r[5], verdict_reply('poisoned', n, 0), ttl_ms, told)
    call('HINCRBY', P .. ':stats', 'verdict:poisoned', 1)
    return 'poisoned', lane, r[6]
  end
  call('HSET', key, 'st', 'queued', 'n', n)
  call('HDEL', key, 'tok', 'w', 'on', 'solo')
  call('HINCRBY', P .. ':stats', 'waiting:' .. lane, 1)
  local push = defer and 'RPUSH' or 'LPUSH'
  if is_suspect(n, max_attempts) then
    call(push, P .. ':suspects:' .. lane, rid)
  elseif call(push, P .. ':wait:' .. lane .. ':' .. r[2] .. ':' .. r[3], rid) == 1 then
    call(push, P .. ':ring:' .. lane .. ':' .. r[2], r[3])
  end
  ring_bell(lane, 1)
  return 'queued', lane, r[6]
end

-- Ends a request that missed its deadline, in its line or attached to another.
local function expire(rid, lane, client, attempts, submitted, now, ttl_ms, told, attached)
  finish(rid, client, verdict_reply('expired', attempts, now - submitted), ttl_ms, told)
  call('HINCRBY', P .. ':stats', 'verdict:expired', 1)
  if not attached then call('HINCRBY', P .. ':stats', 'waiting:' .. lane, -1) end
end

-- When leases may be judged again. While nobody is heard for half a lease (the server was away, or
-- its clock has jumped) leases lapse through no fault of their workers', so all get another half to
-- be heard first. Whoever looks at leases is heard.
local function truce(now, lease_ms)
  local r = call('HMGET', P .. ':stats', 'heard', 'truce')
  local ends = tonumber(r[2] or 0)
  if now - tonumber(r[1] or now) > lease_ms / 2 then
    ends = now + lease_ms / 2
    call('HSET', P .. ':stats', 'truce', ends)
  end
  call('HSET', P .. ':stats', 'heard', now)
  return ends
end

-- Whether anything stands in a lane's lines; it may have been withdrawn.
local function has_line(lane)
  local ring = P .. ':ring:' .. lane .. ':'
  return call('EXISTS', ring .. 0, ring .. 1, ring .. 2, P .. ':suspects:' .. lane) > 0
end

-- Ends all promises to a worker: what it was promised goes to the front, for anybody, and it is
-- promised nothing more until its next claim. Returns how many requests it was.
local function recall(worker)
  local promise, recalled = P .. ':promise:' .. worker, 0
  local rids = call('LRANGE', promise, 0, -1)
  -- From the last to the first, so that the front of the line keeps their order.
  for i = #rids, 1, -1 do
    local key = P .. ':req:' .. rids[i]
    local r = call('HMGET', key, 'to', 'l', 'p', 't')
    if r[1] == worker then
      call('HDEL', key, 'to')
      local place = r[2] .. ':' .. r[3]
      if call('LPUSH', P .. ':wait:' .. place .. ':' .. r[4], rids[i]) == 1 then
        call('LPUSH', P .. ':ring:' .. place, r[4])
      end
      ring_bell(r[2], 1)
      recalled = recalled + 1
    end
  end
  call('UNLINK', promise)
  call('ZREM', P .. ':promises', worker)
  call('HDEL', P .. ':vacant', worker)
  return recalled
end

local function forget_worker(worker)
  recall(worker)
  call('ZREM', P .. ':workers', worker)
  call('HDEL', P .. ':info', worker)
  call('UNLINK', P .. ':stop:' .. worker)
end
