#!lua flags=allow-oom
-- settle(batch) and claim(n) in one call; either part may be empty.
-- settle: accepted only with the current token, or again with the token that already won.
-- claim: up to n requests into the worker's processing list, each with a fresh lease token;
--   tenants in round-robin within a level, levels without starvation, suspects alone.
-- ARGV: worker, lease (ms), time-to-live of replies (ms), nonce of this call, n wanted,
--   n in flight besides those settled here (other than 0 keeps suspects away),
--   most attempts, how long verdicts are remembered (ms), count of results,
--   (rid, token, outcome, reply, fingerprint or '') per result, then the lanes.
-- Returns {per result 1 or 0 (fenced), per request {rid, token, attempts, queued (ms), body, alone, lane},
--   size of the processing list, 1 where this worker should empty itself for a suspect}.
local worker, lease, ttl, nonce = ARGV[1], tonumber(ARGV[2]), ARGV[3], ARGV[4]
local want, busy, max_attempts = tonumber(ARGV[5]), tonumber(ARGV[6]), tonumber(ARGV[7])
local remember, results = tonumber(ARGV[8]), tonumber(ARGV[9])
local now = now_ms()
local work, stats = P .. ':work:' .. worker, P .. ':stats'
local told, counts = {}, {}
local function count(name, n) counts[name] = (counts[name] or 0) + n end

local acks, done = {}, {}
for i = 10, 9 + 5 * results, 5 do
  local rid, token, outcome, reply = ARGV[i], ARGV[i + 1], ARGV[i + 2], ARGV[i + 3]
  local r = call('HMGET', P .. ':req:' .. rid, 'tok', 'c', 'l', 'd')
  local ok = 1
  if r[1] == token then
    local ended = 1
    if r[2] == '' then
      -- Its own client withdrew it before.
      forget_request(rid)
      ended = 0
    else
      finish(rid, r[2], reply, ttl, told)
    end
    done[#done + 1] = rid
    if r[4] then
      if remember > 0 and ARGV[i + 4] ~= '' then
        call('SET', P .. ':verdict:' .. ARGV[i + 4] .. ':' .. r[4], reply, 'PX', remember)
      end
      local shared = share(rid, r[3], r[4], reply, max_attempts, now, ttl, told)
      count('coalesced', shared)
      ended = ended + shared
    end
    count('settled', 1)
    count('verdict:' .. outcome, ended)
  else
    -- 0x93 opens an array of three, 0xa0 + n a text of n bytes: the token is in the reply's head.
    local head = '\147' .. string.char(160 + #token) .. token
    if call('GETRANGE', P .. ':reply:' .. rid, 0, #head - 1) ~= head then
      ok = 0
      count('fenced', 1)
    end
  end
  acks[#acks + 1] = ok
end
for i = 1, #done, 1000 do
  call('ZREM', work, unpack(done, i, math.min(i + 999, #done)))
end

-- What was withdrawn is popped as well, so that one call takes bounded time.
local MOST_POPS = 1000
local jobs, leases, bodies = {}, {}, {}
local pops = 0

-- The fields of a request that waits in this lane; nothing for one that expires hereby, or that
-- was withdrawn: its rid stays in the list, since LREM is slow on long ones.
local function waiting(rid, lane)
  local r = call('HMGET', P .. ':req:' .. rid, 'st', 'l', 'n', 'at', 'exp', 'run', 'c', 'd')
  if r[1] ~= 'queued' or r[2] ~= lane then return nil end
  local deadline = tonumber(r[5])
  if deadline == 0 or now <= deadline then return r end
  expire(rid, lane, r[7], tonumber(r[3]), tonumber(r[4]), now, ttl, told)
  return nil
end

-- Whether a request that waits needs no run of its own, since an identical one runs.
local function follow(rid, lane, r, suspect)
  if not r[8] then return false end
  local leader, its_worker = attach(rid, lane, r[8], r[4], suspect)
  if not leader then return false end
  call('HSET', P .. ':req:' .. rid, 'st', 'attached', 'on', leader, 'w', its_worker,
    'n', tonumber(r[3]) + 1)
  count('waiting:' .. lane, -1)
  return true
end

local function take(rid, lane, alone)
  local r = waiting(rid, lane)
  if not r or follow(rid, lane, r, alone) then return false end
  if r[8] then
    call('SET', run_key(lane, r[8]), rid)
    if alone then call('HSET', P .. ':req:' .. rid, 'solo', 1) end
  end
  local n = tonumber(r[3]) + 1
  local token = nonce .. #jobs
  call('HSET', P .. ':req:' .. rid, 'st', 'leased', 'tok', token, 'w', worker, 'n', n)
  leases[#leases + 1] = now + tonumber(r[6])
  leases[#leases + 1] = rid
  bodies[#bodies + 1] = P .. ':body:' .. rid
  jobs[#jobs + 1] = {rid, token, n, now - tonumber(r[4]), false, alone and 1 or 0, lane}
  count('waiting:' .. lane, -1)
  return true
end

-- Up to n requests of one level; tenants give in turn, and several each where they are few.
local function draw(lane, level, n)
  local ring = P .. ':ring:' .. lane .. ':' .. level
  local got = 0
  while got < n and pops < MOST_POPS do
    local tenants = call('LPOP', ring, n - got)
    if not tenants then break end
    local each = math.floor((n - got) / #tenants)
    local keep = {}
    for _, tenant in ipairs(tenants) do
      local wait = P .. ':wait:' .. lane .. ':' .. level .. ':' .. tenant
      local rids = call('LPOP', wait, each)
      pops = pops + #rids
      for _, rid in ipairs(rids) do
        if take(rid, lane, false) then got = got + 1 end
      end
      if call('LLEN', wait) > 0 then keep[#keep + 1] = tenant end
    end
    if #keep > 0 then call('RPUSH', ring, unpack(keep)) end
  end
  return got
end

-- Seven picks of eight go to the most urgent level that has work; the eighth goes round the levels.
local function claim(lane, n)
  local turn = tonumber(call('HGET', stats, 'turn:' .. lane) or 0)
  local started = turn
  while n > 0 do
    local place = turn % 8
    local first, most = 0, math.min(n, 7 - place)
    if place == 7 then first, most = math.floor(turn / 8) % LEVELS, 1 end
    local got = draw(lane, first, most)
    for level = 0, LEVELS - 1 do
      if got < most and level ~= first then got = got + draw(lane, level, most - got) end
    end
    if got == 0 then break end
    turn, n = turn + got, n - got
  end
  if turn > started then call('HSET', stats, 'turn:' .. lane, turn) end
  return n
end

-- The first suspect of a lane that still waits for a run of its own.
local function suspect(lane)
  local suspects = P .. ':suspects:' .. lane
  local rid = call('LINDEX', suspects, 0)
  while rid do
    local r = waiting(rid, lane)
    if r and not follow(rid, lane, r, true) then break end
    call('LPOP', suspects)
    rid = call('LINDEX', suspects, 0)
  end
  return rid
end

local hold, first_lane = 0, 10 + 5 * results
-- All lanes' suspects come before any lane's other work, which would never let them be alone.
for i = first_lane, #ARGV do
  local lane = ARGV[i]
  local rid = want > 0 and suspect(lane)
  if rid then
    local isolating = P .. ':isolating:' .. lane
    local holder = call('GET', isolating)
    if busy == 0 then
      take(call('LPOP', P .. ':suspects:' .. lane), lane, true)
      -- Its like follow it at once, or each of them would empty a worker.
      suspect(lane)
      if holder == worker then call('DEL', isolating) end
      want = 0
    elseif not holder or holder == worker then
      -- It ends soon after the worker ceases to ask, and not while it still empties itself.
      call('SET', isolating, worker, 'PX', 2 * lease)
      hold, want = 1, 0
    end
  end
end
for i = first_lane, #ARGV do
  if want > 0 then want = claim(ARGV[i], want) end
end

if #jobs > 0 then
  call('ZADD', work, unpack(leases))
  local values = call('MGET', unpack(bodies))
  for i, job in ipairs(jobs) do job[5] = values[i] end
  count('claimed', #jobs)
end
if #jobs > 0 or pops >= MOST_POPS or hold == 1 then
  -- Whoever leaves work behind wakes the next idle worker.
  for i = first_lane, #ARGV do
    local name = 'waiting:' .. ARGV[i]
    if tonumber(call('HGET', stats, name) or 0) + (counts[name] or 0) > 0 then
      ring_bell(ARGV[i], 1)
    end
  end
end
tell(told, ttl)
for name, n in pairs(counts) do
  if n ~= 0 then call('HINCRBY', stats, name, n) end
end
call('ZADD', P .. ':workers', now + lease, worker)
return {acks, jobs, call('ZCARD', work), hold}
