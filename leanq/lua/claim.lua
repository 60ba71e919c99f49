#!lua flags=allow-oom
-- settle(batch) and claim(n) in one call; either part may be empty.
-- settle: accepted only with the current token, or again with the token that already won.
-- claim: up to n requests into the worker's processing list, each with a fresh lease token;
--   tenants in round-robin within a level, levels without starvation, suspects alone; first what
--   the worker was promised, and of a tenant's next ones those that it is warm for.
-- ARGV: worker, lease (ms), time-to-live of replies (ms), nonce of this call, n wanted,
--   n in flight besides those settled here (other than 0 keeps suspects away),
--   most attempts, how long verdicts are remembered (ms), count of results,
--   (rid, token, outcome, reply, fingerprint or '', 1 where the worker is warm for it now, the way
--   in which Lean came by its prefix or '') per result, then the lanes.
-- Returns {per result 1 or 0 (fenced), per request {rid, token, attempts, queued (ms), body, alone, lane},
--   size of the processing list, 1 where this worker should empty itself for a suspect,
--   after how many ms it should claim again, to watch over others' promises (0: it need not)}.
local worker, lease, ttl, nonce = ARGV[1], tonumber(ARGV[2]), ARGV[3], ARGV[4]
local want, busy, max_attempts = tonumber(ARGV[5]), tonumber(ARGV[6]), tonumber(ARGV[7])
local remember, results = tonumber(ARGV[8]), tonumber(ARGV[9])
local first_lane = 10 + 7 * results
-- The workers that are remembered as warm for one thing, and for how long after the last settled
-- it: longer than anybody keeps a process for work that does not come.
local MOST_WARM, WARM_MS = 16, 180000
-- Warm requests among so many at the front of a tenant's line go first. Nothing is passed over
-- later than so long after it first was, however many warm ones come up.
local WINDOW, PASS_MS, COLD = 16, 2000, 3
local now = now_ms()
local work, stats = P .. ':work:' .. worker, P .. ':stats'
local told, counts = {}, {}
local function count(name, n) counts[name] = (counts[name] or 0) + n end

-- Notes that the worker is warm for the strongest of the request's affinities, while it is still
-- there to be asked. The weaker ones say who else would do, and others are warm for them.
local function note_warm(rid)
  local r = call('HMGET', P .. ':req:' .. rid, 'l', 'a')
  local name = string.match(r[2] or '', '%S+')
  if name then
    local warm = P .. ':warm:' .. r[1] .. ':' .. name
    call('ZADD', warm, now, worker)
    call('ZREMRANGEBYRANK', warm, 0, -1 - MOST_WARM)
    call('PEXPIRE', warm, WARM_MS)
  end
end

local acks, done = {}, {}
for i = 10, first_lane - 1, 7 do
  local rid, token, outcome, reply = ARGV[i], ARGV[i + 1], ARGV[i + 2], ARGV[i + 3]
  local r = call('HMGET', P .. ':req:' .. rid, 'tok', 'c', 'l', 'd')
  local ok = 1
  if r[1] == token then
    if ARGV[i + 5] == '1' then note_warm(rid) end
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
    if ARGV[i + 6] ~= '' then count('way:' .. ARGV[i + 6], 1) end
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

-- Per lane in which some requests name affinities, who watches over promises there and until when.
local pinning = {}
if first_lane <= #ARGV then
  local notes = call('HMGET', P .. ':pinning', unpack(ARGV, first_lane))
  for i, note in ipairs(notes) do pinning[ARGV[first_lane + i - 1]] = note or nil end
end
local pinned = next(pinning) ~= nil

-- The fields of a request that waits in this lane; nothing for one that expires hereby, or that
-- was withdrawn: its rid stays in the list, since LREM is slow on long ones.
local function waiting(rid, lane)
  local r = call('HMGET', P .. ':req:' .. rid, 'st', 'l', 'n', 'at', 'exp', 'run', 'c', 'd', 'a', 'by')
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

local warmth = {}
-- How warm the worker is: 1 for the strongest of the affinities, 2 for the next; nil if it is not.
local function warm_for(lane, affinities)
  local rank = 0
  for name in string.gmatch(affinities, '%S+') do
    local warm = P .. ':warm:' .. lane .. ':' .. name
    if warmth[warm] == nil then warmth[warm] = call('ZSCORE', warm, worker) end
    rank = rank + 1
    if warmth[warm] then return rank end
  end
  return nil
end

-- Whether the request is now this worker's.
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
  if r[9] then count(warm_for(lane, r[9]) and 'warm_hits' or 'warm_misses', 1) end
  leases[#leases + 1] = now + tonumber(r[6])
  leases[#leases + 1] = rid
  bodies[#bodies + 1] = P .. ':body:' .. rid
  jobs[#jobs + 1] = {rid, token, n, now - tonumber(r[4]), false, alone and 1 or 0, lane}
  count('waiting:' .. lane, -1)
  return true
end

-- Up to n requests of one tenant's line in a lane where some name affinities: the warmest of the
-- next ones, in their order otherwise.
local function choose(wait, lane, n)
  local line, got = {}, 0
  while got < n do
    local best
    for i = 1, WINDOW do
      while not line[i] and pops < MOST_POPS do
        local rid = call('LINDEX', wait, i - 1)
        if not rid then break end
        pops = pops + 1
        local r = waiting(rid, lane)
        -- One that was withdrawn and sent again stands there twice.
        if r and not line[rid] then
          local rank = r[9] and warm_for(lane, r[9]) or COLD
          line[i], line[rid] = {rid = rid, rank = rank, passed = tonumber(r[10])}, true
        else
          call('LREM', wait, 1, rid)
        end
      end
      local item = line[i]
      if not item then break end
      if not best or item.rank < line[best].rank then best = i end
      if line[best].rank == 1 or item.passed and now - item.passed >= PASS_MS then break end
    end
    if not best then break end
    for i = 1, best - 1 do
      if not line[i].passed then
        call('HSET', P .. ':req:' .. line[i].rid, 'by', now)
        line[i].passed = now
      end
    end
    local rid = table.remove(line, best).rid
    -- It stands near the front, where LREM is fast.
    call('LREM', wait, 1, rid)
    if take(rid, lane, false) then got = got + 1 end
  end
  return got
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
      if pinning[lane] then
        got = got + choose(wait, lane, each)
      else
        local rids = call('LPOP', wait, each)
        pops = pops + #rids
        for _, rid in ipairs(rids) do
          if take(rid, lane, false) then got = got + 1 end
        end
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

-- What other workers were promised and did not come for, each to its line's front.
local function recall_overdue()
  local late = call('ZRANGEBYSCORE', P .. ':promises', '-inf', now, 'LIMIT', 0, 16)
  -- The oldest last, so that it comes to stand first.
  for i = #late, 1, -1 do
    if late[i] ~= worker then count('steals', recall(late[i])) end
  end
end

-- Takes what the worker was promised; how much that was.
local function redeem()
  local got = 0
  while want > 0 do
    local rid = call('LPOP', P .. ':promise:' .. worker)
    if not rid then break end
    local key = P .. ':req:' .. rid
    local r = call('HMGET', key, 'to', 'l')
    if r[1] == worker then
      call('HDEL', key, 'to')
      if take(rid, r[2], false) then got, want = got + 1, want - 1 end
    end
  end
  return got
end

-- Somebody with nothing better to do watches over others' promises, and takes what they do not
-- come for: one guard in each lane, who looks again at times.
-- Returns after how long (ms) this worker should look, if it is the one.
local function watch(lane, redeemed)
  local soonest = tonumber(call('ZRANGE', P .. ':promises', 0, 0, 'WITHSCORES')[2])
  local ends, guard = string.match(pinning[lane], '^(%d+) (.*)$')
  ends = tonumber(ends) > now and tonumber(ends)
  if ends and guard ~= worker and guard ~= '' then return 0 end
  if not soonest and not ends then return 0 end
  if want > 0 and redeemed == 0 then
    local till = math.max(soonest or ends, now + 1)
    call('HSET', P .. ':pinning', lane, till .. ' ' .. worker)
    return till - now
  end
  -- With the promises themselves came one token of the doorbell, and another comes for it.
  if soonest and redeemed == 0 then ring_bell(lane, 1) end
  if guard == worker then call('HSET', P .. ':pinning', lane, '0 ') end
  return 0
end

local hold = 0
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
local redeemed = 0
if pinned then
  recall_overdue()
  redeemed = redeem()
end
for i = first_lane, #ARGV do
  if want > 0 then want = claim(ARGV[i], want) end
end
local again = 0
if pinned then
  recall(worker)
  if want > 0 then call('HSET', P .. ':vacant', worker, want) end
  for lane in pairs(pinning) do
    local wait = watch(lane, redeemed)
    if wait > 0 then again = again > 0 and math.min(again, wait) or wait end
  end
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
    if tonumber(call('HGET', stats, name) or 0) + (counts[name] or 0) > 0
      and (not pinning[ARGV[i]] or has_line(ARGV[i])) then
      ring_bell(ARGV[i], 1)
    end
  end
end
tell(told, ttl)
for name, n in pairs(counts) do
  if n ~= 0 then call('HINCRBY', stats, name, n) end
end
call('ZADD', P .. ':workers', now + lease, worker)
return {acks, jobs, call('ZCARD', work), hold, again}
