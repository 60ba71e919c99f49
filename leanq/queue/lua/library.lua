-- Shared by all scripts: each is sent as this text followed by sharing.lua and its own.
-- KEYS[1] is the shard's tag, {PREFIX:SHARD}; every key is built from it and so lies in its slot.
local P = KEYS[1]
local REQ, WHERE, STATS = P .. ':req:', P .. ':where', P .. ':stats'
local TALLY, MINUTES = P .. ':tally', P .. ':minutes'
-- A day of history, and an hour more.
local MOST_MINUTES = 1500
local PRIORITIES = 3
-- Replies up to this many bytes travel in the inbox itself; of larger ones it has the size alone, and
-- they are fetched by request id, which costs less than a second copy.
local INLINE_BYTES = 16384
-- A wake-up never holds more tokens than this; whoever claims and leaves work rings on.
local WAKEUP_TOKENS = 16
-- The newest dead letters that are kept for people to look at.
local DEAD_LETTERS = 10000
-- A warm worker that waits comes for its reservation within milliseconds, over any network. Who has not
-- come by then is dead or stuck, and others take what it was reserved.
local REASSIGN_MS = 100
-- What operators hold back: environments (e:ENVIRONMENT), of which nothing is claimed, and tenants (t:TENANT), who
-- stand in :parked instead of their rings.
local PAUSED = P .. ':paused'
local call = redis.call

local function now_ms()
  local t = call('TIME')
  return t[1] * 1000 + math.floor(t[2] / 1000)
end

-- One command for a list of any length, after the key if there is one: Lua's unpack ends near 8,000
-- values. Returns what a command that answers with a list says of all of it.
local function bulk(command, key, list)
  local all
  for i = 1, #list, 4000 do
    local last, part = math.min(i + 3999, #list), nil
    if key then part = call(command, key, unpack(list, i, last))
    else part = call(command, unpack(list, i, last)) end
    if not all then all = part
    else for _, item in ipairs(type(part) == 'table' and part or {}) do all[#all + 1] = item end end
  end
  return all or {}
end

-- How many of these keys there are.
local function existing(names)
  local n = 0
  for i = 1, #names, 4000 do
    n = n + call('EXISTS', unpack(names, i, math.min(i + 3999, #names)))
  end
  return n
end

-- A request in flight is one string, its record: the version of this layout, attempts that have
-- ended, priority, submitted (ms), deadline in the queue (ms, 0: none), longest run (ms), environment, client,
-- affinities, tenant, digest, and the body as the client packed it. Its reply takes its place.
local LAYOUT, VERSION = '>BBBdddsssss', 1
local HEAD_BYTES = 1024

local ATTEMPTS, PRIORITY, AT, DEADLINE, RUN, ENVIRONMENT, CLIENT = 2, 3, 4, 5, 6, 7, 8
local AFFINITIES, TENANT, DIGEST, BODY = 9, 10, 11, 12

-- The record in a text, as a list in that order, where in place of the body stands where it begins;
-- nil where the text is something else.
local function read_record(text)
  if not text or string.byte(text) ~= VERSION then return nil end
  return {struct.unpack(LAYOUT, text)}
end

-- The record of a request, without its body.
local function record(request_id)
  return read_record(call('GETRANGE', REQ .. request_id, 0, HEAD_BYTES - 1))
end

-- :where says of each request in flight that does not simply wait in its line where it is:
-- l leased: token, worker, client, environment, '1' where it runs alone, digest
-- a attached: leader, the leader's worker;  p waits, reserved: worker
-- q waits, and a warmer one first went before it: when (ms)
-- Texts end with a zero byte.
local function lease(token, worker, client, environment, solo, digest)
  return table.concat({'l' .. token, worker, client, environment, solo, digest, ''}, '\0')
end

local function read_lease(place)
  if not place or string.sub(place, 1, 1) ~= 'l' then return nil end
  local token, worker, client, environment, solo, digest = struct.unpack('ssssss', place, 2)
  return {token = token, worker = worker, client = client, environment = environment, solo = solo,
    digest = digest}
end

-- The lease as it is, with another client to be told of its end.
local function lease_to(request_id, run, client)
  call('HSET', WHERE, request_id, lease(run.token, run.worker, client, run.environment, run.solo, run.digest))
end

local function attachment(leader, worker) return 'a' .. leader .. '\0' .. worker .. '\0' end

-- The leader that a request is attached to, and its worker; nil where it is not.
local function read_attachment(place)
  if not place or string.sub(place, 1, 1) ~= 'a' then return nil end
  return struct.unpack('ss', place, 2)
end

local function notify(environment, count)
  local wakeup = P .. ':wakeup:' .. environment
  local missing = math.min(count, WAKEUP_TOKENS) - call('LLEN', wakeup)
  for _ = 1, missing do call('RPUSH', wakeup, '1') end
end

-- Tells clients that requests ended: one stream entry per client and call.
-- told: client -> {request_id, reply, request id, reply, ...}
local function tell(told, ttl_ms)
  for client, fields in pairs(told) do
    local inbox = P .. ':inbox:' .. client
    call('XADD', inbox, '*', unpack(fields))
    call('PEXPIRE', inbox, ttl_ms)
  end
end

-- The reply in the place of the record, and its client told.
local function answer(request_id, client, reply, ttl_ms, told)
  call('SET', REQ .. request_id, reply, 'PX', ttl_ms)
  local fields = told[client]
  if not fields then fields = {}; told[client] = fields end
  fields[#fields + 1] = request_id
  fields[#fields + 1] = #reply <= INLINE_BYTES and reply or #reply
  if #fields >= 4000 then tell({[client] = fields}, ttl_ms); told[client] = nil end
end

-- Ends a request.
local function finish(request_id, client, reply, ttl_ms, told)
  call('HDEL', WHERE, request_id)
  answer(request_id, client, reply, ttl_ms, told)
end

-- The reply that a script itself gives, in the wire format of version 1.
local function verdict_reply(verdict, attempts, queued_ms)
  return cmsgpack.pack({'', 1, {verdict = verdict, attempts = attempts, queued_s = queued_ms / 1000}})
end

-- Counts the end of a request in its environment.
local function tally_end(environment, verdict, n) call('HINCRBY', TALLY, 'f:' .. environment .. ':' .. verdict, n) end

-- Once a minute, whoever comes first notes the totals so far, so that history outlives the fleet. What
-- waits and who works is as of that moment; the histograms are left out.
local function note_minute(now)
  local minute = math.floor(now / 60000)
  if minute <= tonumber(call('HGET', TALLY, 'minute') or 0) then return end
  call('HSET', TALLY, 'minute', minute)
  local totals, all = {}, call('HGETALL', TALLY)
  for i = 1, #all, 2 do
    if string.match(all[i], '^[sf]:') or string.match(all[i], '^%a_ms:') then
      totals[all[i]] = tonumber(all[i + 1])
    end
  end
  local stats = call('HGETALL', STATS)
  for i = 1, #stats, 2 do
    if string.match(stats[i], '^waiting:') then totals[stats[i]] = tonumber(stats[i + 1]) end
  end
  totals.workers = call('ZCARD', P .. ':workers')
  call('ZADD', MINUTES, minute, cmsgpack.pack({minute, totals}))
  call('ZREMRANGEBYRANK', MINUTES, 0, -1 - MOST_MINUTES)
end

-- The last attempt runs alone, so that the neighbours of a killer are not condemned with it.
local function is_quarantined(attempts, max_attempts)
  return attempts > 0 and attempts == max_attempts - 1
end

-- Keeps what took down its workers, for people to look at: the newest of them.
local function bury(request_id, attempts, worker, now)
  call('HSET', P .. ':deadreq:' .. request_id, 'record', call('GET', REQ .. request_id), 'n', attempts,
    'w', worker)
  call('ZADD', P .. ':dead', now, request_id)
  local surplus = call('ZCARD', P .. ':dead') - DEAD_LETTERS
  if surplus > 0 then
    local oldest = call('ZPOPMIN', P .. ':dead', surplus)
    for i = 1, #oldest, 2 do call('UNLINK', P .. ':deadreq:' .. oldest[i]) end
  end
end

local function is_paused(kind, name) return call('HEXISTS', PAUSED, kind .. ':' .. name) == 1 end

-- Gives a tenant whose line was empty its place in the ring (push says at which end), or keeps it
-- apart while it is paused.
local function give_turn(push, line, tenant)
  if is_paused('t', tenant) then call('SADD', P .. ':parked:' .. line, tenant)
  else call(push, P .. ':ring:' .. line, tenant) end
end

-- Puts one request that was leased or attached back to the front, or makes it a dead letter.
-- charge: whether the attempt counts. defer: to the end of its line instead.
-- Returns 'queued', 'poisoned' or 'lost'.
local function put_back(request_id, charge, max_attempts, now, ttl_ms, told, defer)
  local place, r = call('HGET', WHERE, request_id), record(request_id)
  call('HDEL', WHERE, request_id)
  -- It has its reply, and ran for its followers alone; or somebody deleted it, perhaps the server
  -- to make room, and its client will send it again.
  if not r then return 'lost' end
  local n = r[ATTEMPTS] + (charge and 1 or 0)
  if n >= max_attempts then
    local run = read_lease(place)
    local _, leaders = read_attachment(place)
    bury(request_id, n, run and run.worker or leaders or '', now)
    answer(request_id, r[CLIENT], verdict_reply('poisoned', n, 0), ttl_ms, told)
    call('HINCRBY', STATS, 'verdict:poisoned', 1)
    tally_end(r[ENVIRONMENT], 'poisoned', 1)
    return 'poisoned'
  end
  if n ~= r[ATTEMPTS] then call('SETRANGE', REQ .. request_id, 1, string.char(n)) end
  call('HINCRBY', STATS, 'waiting:' .. r[ENVIRONMENT], 1)
  local push, line = defer and 'RPUSH' or 'LPUSH', r[ENVIRONMENT] .. ':' .. r[PRIORITY]
  if is_quarantined(n, max_attempts) then
    call(push, P .. ':quarantined:' .. r[ENVIRONMENT], request_id)
  elseif call(push, P .. ':wait:' .. line .. ':' .. r[TENANT], request_id) == 1 then
    give_turn(push, line, r[TENANT])
  end
  notify(r[ENVIRONMENT], 1)
  return 'queued'
end

-- Ends a request that missed its deadline, in its line or attached to another.
local function expire(request_id, r, attempts, now, ttl_ms, told, attached)
  finish(request_id, r[CLIENT], verdict_reply('expired', attempts, now - r[AT]), ttl_ms, told)
  call('HINCRBY', STATS, 'verdict:expired', 1)
  tally_end(r[ENVIRONMENT], 'expired', 1)
  if not attached then call('HINCRBY', STATS, 'waiting:' .. r[ENVIRONMENT], -1) end
end

local function is_late(r, now) return r[DEADLINE] > 0 and now > r[DEADLINE] end

-- Makes a client the one who is told of a request's end, its run's included.
local function hand_over(request_id, r, client, place)
  if r[CLIENT] == client then return end
  local text = call('GET', REQ .. request_id)
  call('SET', REQ .. request_id, struct.pack(LAYOUT, VERSION, r[ATTEMPTS], r[PRIORITY], r[AT], r[DEADLINE], r[RUN],
    r[ENVIRONMENT], client, r[AFFINITIES], r[TENANT], r[DIGEST]) .. string.sub(text, r[BODY]))
  local run = read_lease(place)
  if run then lease_to(request_id, run, client) end
end

-- When leases may be judged again. While nobody is heard for half a lease (the server was away, or
-- its clock has jumped) leases lapse through no fault of their workers', so all get another half to
-- be heard first. Whoever looks at leases is heard.
local function expiry_grace(now, lease_ms)
  local r = call('HMGET', STATS, 'heard', 'expiry_grace')
  local ends = tonumber(r[2] or 0)
  if now - tonumber(r[1] or now) > lease_ms / 2 then
    ends = now + lease_ms / 2
    call('HSET', STATS, 'expiry_grace', ends)
  end
  call('HSET', STATS, 'heard', now)
  return ends
end

-- Whether anything stands in an environment's lines; it may have been withdrawn.
local function has_line(environment)
  local ring = P .. ':ring:' .. environment .. ':'
  return call('EXISTS', ring .. 0, ring .. 1, ring .. 2, P .. ':quarantined:' .. environment) > 0
end

-- Ends all reservations to a worker: what it was reserved goes to the front, for anybody, and it is
-- reserved nothing more until its next claim. Returns how many requests it was.
local function recall(worker)
  local reservation, recalled = P .. ':reservation:' .. worker, 0
  local request_ids = call('LRANGE', reservation, 0, -1)
  -- From the last to the first, so that the front of the line keeps their order.
  for i = #request_ids, 1, -1 do
    local r = call('HGET', WHERE, request_ids[i]) == 'p' .. worker and record(request_ids[i])
    if r then
      call('HDEL', WHERE, request_ids[i])
      local line = r[ENVIRONMENT] .. ':' .. r[PRIORITY]
      if call('LPUSH', P .. ':wait:' .. line .. ':' .. r[TENANT], request_ids[i]) == 1 then
        give_turn('LPUSH', line, r[TENANT])
      end
      notify(r[ENVIRONMENT], 1)
      recalled = recalled + 1
    end
  end
  call('UNLINK', reservation)
  call('ZREM', P .. ':reservations', worker)
  call('HDEL', P .. ':vacant', worker)
  return recalled
end

local function forget_worker(worker)
  recall(worker)
  call('ZREM', P .. ':workers', worker)
  call('HDEL', P .. ':info', worker)
  call('UNLINK', P .. ':stop:' .. worker)
end
