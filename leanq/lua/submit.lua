#!lua
-- submit(batch): takes requests in, or says why not. Idempotent by rid.
-- Without allow-oom: a full memory refuses the whole call and so becomes back-pressure.
-- ARGV: client, most that may wait per lane and tenant,
--       time-to-live of replies (ms) where remembered verdicts count, else 0, then per request
--       rid, lane, tenant, level, deadline in the queue (ms from now, 0: none), longest run (ms),
--       body, digest or '', affinities (the strongest first, between spaces)
-- Returns per request: 1 queued or attached to one that runs, 2 already in flight (the client is attached to it),
--       3 the tenant's lane is full, 4 no worker ever offered this lane, or the reply itself.
local client, most = ARGV[1], tonumber(ARGV[2])
local now = now_ms()
local any_lane = call('HLEN', P .. ':lanes') > 0
local remember = tonumber(ARGV[3])
local known, room, added, prints = {}, {}, {}, {}
local out, bodies, batch, batch_key, batch_ring, batch_tenant = {}, {}, {}, nil, nil, nil
local count, remembered = 0, 0

local function append_batch()
  if batch_key and call('RPUSH', batch_key, unpack(batch)) == #batch then
    call('RPUSH', batch_ring, batch_tenant)
  end
  batch, batch_key = {}, nil
end

-- The reply that an identical request got in the environment as it is now.
local function remembered_reply(lane, digest)
  if prints[lane] == nil then prints[lane] = call('HGET', P .. ':prints', lane) end
  return prints[lane] and call('GET', P .. ':verdict:' .. prints[lane] .. ':' .. digest)
end

-- Loose pinning: what a warm and idle worker is promised enters no line.
local pinned, open, promised, promisees = {}, {}, {}, {}

-- From now on claims of this lane look for what they are warm for, also among what comes back.
local function pin(lane)
  if not pinned[lane] then call('HSETNX', P .. ':pinning', lane, '0 ') end
  pinned[lane] = true
end

-- The worker to be promised a request: idle, and warm for the strongest affinity possible. None
-- where something else waits in the lane, which has the first claim to any idle worker.
local function warm_worker(lane, affinities)
  if open[lane] == nil then open[lane] = not has_line(lane) end
  if not open[lane] then return nil end
  for name in string.gmatch(affinities, '%S+') do
    local workers = call('ZREVRANGE', P .. ':warm:' .. lane .. ':' .. name, 0, -1)
    local vacant = #workers > 0 and call('HMGET', P .. ':vacant', unpack(workers))
    for i, worker in ipairs(workers) do
      if tonumber(vacant[i] or 0) > 0
        and tonumber(call('ZSCORE', P .. ':workers', worker) or 0) > now then
        return worker
      end
    end
  end
  return nil
end

local function promise(rid, lane, worker)
  call('HSET', P .. ':req:' .. rid, 'to', worker)
  call('HINCRBY', P .. ':vacant', worker, -1)
  call('ZADD', P .. ':promises', 'NX', now + STEAL_MS, worker)
  -- The claim that takes the first takes all.
  if call('RPUSH', P .. ':promise:' .. worker, rid) == 1 then
    call('RPUSH', P .. ':stop:' .. worker, '+')
  end
  promised[lane] = (promised[lane] or 0) + 1
  promisees[worker] = true
end

-- Wakes another worker to watch over promises, unless one does so already. Nobody watches over
-- promises to himself: they would be forgotten if he died.
local function post_guard(lane)
  local ends, guard = string.match(call('HGET', P .. ':pinning', lane), '^(%d+) (.*)$')
  if tonumber(ends) > now and not promisees[guard] then return end
  call('HSET', P .. ':pinning', lane, now + STEAL_MS .. ' ')
  if call('ZCARD', P .. ':workers') > 1 then ring_bell(lane, 1) end
end

for i = 4, #ARGV, 9 do
  local rid, lane, tenant, level = ARGV[i], ARGV[i + 1], ARGV[i + 2], ARGV[i + 3]
  local wait = P .. ':wait:' .. lane .. ':' .. level .. ':' .. tenant
  local key = P .. ':req:' .. rid
  if known[lane] == nil then
    known[lane] = not any_lane or call('HEXISTS', P .. ':lanes', lane) == 1
  end
  if room[wait] == nil then room[wait] = most - call('LLEN', wait) end
  local digest, answer = ARGV[i + 7], nil
  if call('EXISTS', key, P .. ':reply:' .. rid) > 0 then
    answer = call('GET', P .. ':reply:' .. rid)
    if not answer then
      call('HSET', key, 'c', client)
      answer = 2
    end
  elseif not known[lane] then
    answer = 4
  else
    local reply = digest ~= '' and remember > 0 and remembered_reply(lane, digest)
    local leader, worker
    if digest ~= '' and not reply then leader, worker = attach(rid, lane, digest, now) end
    if reply then
      call('SET', P .. ':reply:' .. rid, reply, 'PX', remember)
      remembered = remembered + 1
      answer = reply
    elseif not leader and room[wait] <= 0 then
      answer = 3
    else
      local deadline = tonumber(ARGV[i + 4])
      call('HSET', key, 'st', 'queued', 'l', lane, 't', tenant, 'p', level, 'c', client, 'n', 0,
        'at', now, 'exp', deadline > 0 and now + deadline or 0, 'run', ARGV[i + 5])
      bodies[#bodies + 1] = P .. ':body:' .. rid
      bodies[#bodies + 1] = ARGV[i + 6]
      if digest ~= '' then call('HSET', key, 'd', digest) end
      local affinities = ARGV[i + 8]
      if affinities ~= '' then
        call('HSET', key, 'a', affinities)
        pin(lane)
      end
      if leader then
        call('HSET', key, 'st', 'attached', 'on', leader, 'w', worker, 'n', 1)
      else
        added[lane] = (added[lane] or 0) + 1
        local warm = affinities ~= '' and warm_worker(lane, affinities)
        if warm then
          promise(rid, lane, warm)
        else
          if batch_key ~= wait or #batch >= 1000 then append_batch() end
          batch_key, batch_ring, batch_tenant = wait, P .. ':ring:' .. lane .. ':' .. level, tenant
          batch[#batch + 1] = rid
          room[wait] = room[wait] - 1
          open[lane] = false
        end
      end
      count = count + 1
      answer = 1
    end
  end
  out[#out + 1] = answer
end
append_batch()
for i = 1, #bodies, 1000 do
  call('MSET', unpack(bodies, i, math.min(i + 999, #bodies)))
end
if remembered > 0 then call('HINCRBY', P .. ':stats', 'remembered', remembered) end
if count > 0 then
  call('HINCRBY', P .. ':stats', 'submitted', count)
  for lane, n in pairs(added) do
    call('HINCRBY', P .. ':stats', 'waiting:' .. lane, n)
    ring_bell(lane, n - (promised[lane] or 0))
    if promised[lane] then post_guard(lane) end
  end
end
return out
