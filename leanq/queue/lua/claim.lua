#!lua flags=allow-oom
-- settle(batch) and claim(n) in one call; either part may be empty.
-- settle: accepted only with the current token, or again with the token that already won.
-- claim: up to n requests into the worker's processing list, with a lease token that is new for this call;
--   tenants in round-robin within a priority, priorities without starvation, quarantined requests alone; first what
--   the worker was reserved, and of a tenant's next ones those that it is warm for.
-- ARGV: worker, lease (ms), time-to-live of replies (ms), token of the new leases, n wanted,
--   n in flight besides those settled here (other than 0 keeps quarantined requests away),
--   most attempts, how long verdicts are remembered (ms), count of results,
--   (request id, token, reply, about) per result, then the environments. About, which most results share:
--   outcome, 1 where the worker is warm for it now, the way in which Lean came by its prefix or '',
--   fingerprint or '', environment, and its times, with a space between: of w(aited), r(an) and t(otal) each
--   the letter, ms, a slash, and the number of the histogram's bucket. An older release leaves the last two out.
-- Returns {per result 1 or 0 (fenced), per request four values: request id, about, submitted (ms), body,
--   size of the processing list, 1 where this worker should empty itself for a quarantined request,
--   after how many ms it should claim again, to watch over others' reservations (0: it need not), now (ms),
--   1 where requests of these environments may be reserved to workers}.
--   About: attempts, 1 where it runs alone, environment.
-- Warm requests among so many at the front of a tenant's line go first. Nothing is passed over
-- later than so long after it first was, however many warm ones come up.
local WINDOW, PASS_MS, COLD = 16, 2000, 3
local acks = settle_all()

-- Tells everybody what became of it; returns the size of the processing list.
local function conclude()
  tell(told, ttl)
  for name, n in pairs(counts) do
    if n ~= 0 then call('HINCRBY', STATS, name, n) end
  end
  for name, n in pairs(tallies) do
    if n ~= 0 then call('HINCRBY', TALLY, name, n) end
  end
  call('ZADD', P .. ':workers', now + lease_ms, worker)
  return call('ZCARD', work)
end

-- The environments that are not held back.
local environments = {unpack(ARGV, first_environment)}
if #environments > 0 and call('EXISTS', PAUSED) == 1 then
  for i = #environments, 1, -1 do
    if is_paused('e', environments[i]) then table.remove(environments, i) end
  end
end
if #environments == 0 then return {acks, {}, conclude(), 0, 0, now, 0} end

-- What was withdrawn is popped as well, so that one call takes bounded time.
local MOST_POPS = 1000
local pops, jobs, leases, places, taken = 0, {}, {}, {}, {}

-- Per environment in which some requests name affinities, who watches over reservations there and until when.
local pinning = {}
for i, note in ipairs(call('HMGET', P .. ':pinning', unpack(environments))) do
  pinning[environments[i]] = note or nil
end
local pinned = next(pinning) ~= nil

-- The records of requests, and where each is.
local function look(request_ids)
  local names = {}
  for i, request_id in ipairs(request_ids) do names[i] = REQ .. request_id end
  return bulk('MGET', nil, names), bulk('HMGET', WHERE, request_ids)
end

-- The request, if it waits in this environment. Nil for what expires hereby, and for what was withdrawn: its
-- request id stays in the list, since LREM is slow on long ones.
local function waits(environment, request_id, text, place)
  local passed = place and string.match(place, '^q(.*)')
  local r = (not place or passed) and not taken[request_id] and read_record(text)
  if not r or r[ENVIRONMENT] ~= environment then return nil end
  if is_late(r, now) then
    expire(request_id, r, r[ATTEMPTS], now, ttl, told)
    taken[request_id] = true
    return nil
  end
  r.request_id, r.text, r.passed = request_id, text, passed and tonumber(passed)
  return r
end

-- Those of the requests that wait in this environment.
local function waiting(environment, request_ids)
  local found, n = {}, 0
  local texts, places = look(request_ids)
  for i, request_id in ipairs(request_ids) do
    local r = waits(environment, request_id, texts[i], places[i])
    if r then n = n + 1; found[n] = r end
  end
  return found
end

-- Whether a request that waits needs no run of its own, since an identical one runs.
local function follow(r, quarantined)
  if r[DIGEST] == '' then return false end
  local leader = call('HGET', RUNS, run_of(r[ENVIRONMENT], r[DIGEST]))
  if not attach(r.request_id, leader, r[DIGEST], r[AT], quarantined) then return false end
  taken[r.request_id] = true
  count('waiting:' .. r[ENVIRONMENT], -1)
  return true
end

-- What leases of this call have in common, and what their requests tell of themselves: by client and
-- environment, and by attempts and environment, since most are the same.
local made, told_of = {}, {}

local function lease_for(r, solo)
  if r[DIGEST] ~= '' then
    return lease(token, worker, r[CLIENT], r[ENVIRONMENT], solo, r[DIGEST])
  end
  local environments = made[r[CLIENT]]
  if not environments then environments = {}; made[r[CLIENT]] = environments end
  if not environments[r[ENVIRONMENT]] then environments[r[ENVIRONMENT]] = lease(token, worker, r[CLIENT], r[ENVIRONMENT], '', '') end
  return environments[r[ENVIRONMENT]]
end

local function about(r, alone)
  local environments = told_of[r[ATTEMPTS]]
  if not environments then environments = {}; told_of[r[ATTEMPTS]] = environments end
  if not environments[r[ENVIRONMENT]] then
    environments[r[ENVIRONMENT]] = r[ATTEMPTS] + 1 .. (alone and ' 1 ' or ' 0 ') .. r[ENVIRONMENT]
  end
  return environments[r[ENVIRONMENT]]
end

local warmth = {}
-- How warm the worker is: 1 for the strongest of the affinities, 2 for the next; nil if it is not.
local function warm_for(r)
  local rank = 0
  for name in string.gmatch(r[AFFINITIES], '%S+') do
    local warm = P .. ':warm:' .. r[ENVIRONMENT] .. ':' .. name
    if warmth[warm] == nil then warmth[warm] = call('ZSCORE', warm, worker) end
    rank = rank + 1
    if warmth[warm] then return rank end
  end
  return nil
end

-- Requests that this call has leased, by environment.
local taken_in = {}

-- Whether the request, which waits, is now this worker's.
local function take(r, alone)
  if follow(r, alone) then return false end
  local request_id, environment, n, solo = r.request_id, r[ENVIRONMENT], #leases, ''
  if r[DIGEST] ~= '' then
    call('HSET', RUNS, run_of(environment, r[DIGEST]), request_id)
    solo = alone and '1' or ''
  end
  local place = lease_for(r, solo)
  -- Where others may attach to it still in this call.
  if r[DIGEST] ~= '' then pending[request_id] = place end
  if r[AFFINITIES] ~= '' then count(warm_for(r) and 'warm_hits' or 'warm_misses', 1) end
  places[n + 1], places[n + 2] = request_id, place
  leases[n + 1], leases[n + 2] = now + r[RUN], request_id
  n = 2 * n
  jobs[n + 1], jobs[n + 2], jobs[n + 3] = request_id, about(r, alone), r[AT]
  jobs[n + 4] = string.sub(r.text, r[BODY])
  taken[request_id] = true
  taken_in[environment] = (taken_in[environment] or 0) + 1
  return true
end

-- Up to n requests of one tenant's line in an environment where some name affinities: the warmest of the
-- next ones, in their order otherwise. The rest of what was popped goes back to the front.
local function choose(wait, environment, n)
  local line, got = {}, 0
  -- What was popped, and how much of that was looked at.
  local popped, texts, held, seen = {}, nil, nil, 0
  -- The i-th that waits, if there is one.
  local function at(i)
    while not line[i] and pops < MOST_POPS do
      if seen == #popped then
        popped, seen = call('LPOP', wait, n - got + WINDOW - i) or {}, 0
        if #popped == 0 then break end
        texts, held = look(popped)
      end
      seen, pops = seen + 1, pops + 1
      local r = waits(environment, popped[seen], texts[seen], held[seen])
      -- One that was withdrawn and sent again stands there twice.
      if r and not line[r.request_id] then
        r.rank = r[AFFINITIES] ~= '' and warm_for(r) or COLD
        line[i], line[r.request_id] = r, true
      end
    end
    return line[i]
  end
  while got < n do
    local best
    for i = 1, WINDOW do
      local r = at(i)
      if not r then break end
      if not best or r.rank < line[best].rank then best = i end
      if line[best].rank == 1 or r.passed and now - r.passed >= PASS_MS then break end
    end
    if not best then break end
    for i = 1, best - 1 do
      if not line[i].passed then
        call('HSET', WHERE, line[i].request_id, 'q' .. now)
        line[i].passed = now
      end
    end
    if take(table.remove(line, best), false) then got = got + 1 end
  end
  local rest = {}
  for i = #popped, seen + 1, -1 do rest[#rest + 1] = popped[i] end
  for i = #line, 1, -1 do rest[#rest + 1] = line[i].request_id end
  bulk('LPUSH', wait, rest)
  return got
end

-- Which of the lists are not empty; asked for all at once, since mostly all are, or none is.
local function filled(lists)
  local full = {}
  local n = existing(lists)
  for i, list in ipairs(lists) do
    full[i] = n == #lists or n > 0 and call('EXISTS', list) == 1
  end
  return full
end

-- Up to n requests of one priority; tenants give in turn, and several each where they are few.
local function draw(environment, priority, n)
  local ring = P .. ':ring:' .. environment .. ':' .. priority
  local got = 0
  while got < n and pops < MOST_POPS do
    local asked = n - got
    local tenants = call('LPOP', ring, asked)
    if not tenants then break end
    local each = math.floor(asked / #tenants)
    local lists, request_ids, keep = {}, {}, {}
    for i, tenant in ipairs(tenants) do
      local wait = P .. ':wait:' .. environment .. ':' .. priority .. ':' .. tenant
      lists[i] = wait
      if pinning[environment] then
        got = got + choose(wait, environment, each)
      elseif each == 1 then
        request_ids[#request_ids + 1] = call('LPOP', wait) or nil
      else
        for _, request_id in ipairs(call('LPOP', wait, each) or {}) do request_ids[#request_ids + 1] = request_id end
      end
    end
    pops = pops + #request_ids
    for _, r in ipairs(#request_ids > 0 and waiting(environment, request_ids) or {}) do
      if not taken[r.request_id] and take(r, false) then got = got + 1 end
    end
    for i, full in ipairs(filled(lists)) do
      if full then keep[#keep + 1] = tenants[i] end
    end
    if #keep > 0 then call('RPUSH', ring, unpack(keep))
    elseif #tenants < asked then break end
  end
  return got
end

-- Seven picks of eight go to the most urgent priority that has work; the eighth goes round the priorities.
local function claim(environment, n)
  local turn = tonumber(call('HGET', STATS, 'turn:' .. environment) or 0)
  local started, priorities = turn, {}
  for priority = 0, PRIORITIES - 1 do
    if call('EXISTS', P .. ':ring:' .. environment .. ':' .. priority) == 1 then priorities[#priorities + 1] = priority end
  end
  while n > 0 and #priorities > 0 do
    local place = turn % 8
    local first, most = 0, math.min(n, 7 - place)
    -- Where but one priority has work, all picks are its own.
    if #priorities == 1 then first, most = priorities[1], n
    elseif place == 7 then first, most = math.floor(turn / 8) % PRIORITIES, 1 end
    local got = draw(environment, first, most)
    for _, priority in ipairs(priorities) do
      if got < most and priority ~= first then got = got + draw(environment, priority, most - got) end
    end
    turn, n = turn + got, n - got
    if got == 0 or #priorities == 1 then break end
  end
  if turn > started then call('HSET', STATS, 'turn:' .. environment, turn) end
  return n
end

-- The first quarantined request of an environment that still waits for a run of its own.
local function quarantined(environment)
  local quarantined = P .. ':quarantined:' .. environment
  local request_id = call('LINDEX', quarantined, 0)
  while request_id do
    local r = waiting(environment, {request_id})[1]
    if r and not follow(r, true) then return r end
    call('LPOP', quarantined)
    request_id = call('LINDEX', quarantined, 0)
  end
  return nil
end

-- What other workers were reserved and did not come for, each to its line's front.
local function recall_overdue()
  local late = call('ZRANGEBYSCORE', P .. ':reservations', '-inf', now, 'LIMIT', 0, 16)
  -- The oldest last, so that it comes to stand first.
  for i = #late, 1, -1 do
    if late[i] ~= worker then count('reassignments', recall(late[i])) end
  end
end

-- Takes what the worker was reserved; how much that was.
local function redeem()
  local got = 0
  while want > 0 do
    local request_id = call('LPOP', P .. ':reservation:' .. worker)
    if not request_id then break end
    if call('HGET', WHERE, request_id) == 'p' .. worker then
      call('HDEL', WHERE, request_id)
      local known = record(request_id)
      local r = known and waiting(known[ENVIRONMENT], {request_id})[1]
      if r and take(r, false) then got, want = got + 1, want - 1 end
    end
  end
  return got
end

-- Somebody with nothing better to do watches over others' reservations, and takes what they do not
-- come for: one watchdog in each environment, who looks again at times.
-- Returns after how long (ms) this worker should look, if it is the one.
local function watch(environment, redeemed)
  local soonest = tonumber(call('ZRANGE', P .. ':reservations', 0, 0, 'WITHSCORES')[2])
  local ends, watchdog = string.match(pinning[environment], '^(%d+) (.*)$')
  ends = tonumber(ends) > now and tonumber(ends)
  if ends and watchdog ~= worker and watchdog ~= '' then return 0 end
  if not soonest and not ends then return 0 end
  if want > 0 and redeemed == 0 then
    local till = math.max(soonest or ends, now + 1)
    call('HSET', P .. ':pinning', environment, till .. ' ' .. worker)
    return till - now
  end
  -- With the reservations themselves came one token of the wake-up, and another comes for it.
  if soonest and redeemed == 0 then notify(environment, 1) end
  if watchdog == worker then call('HSET', P .. ':pinning', environment, '0 ') end
  return 0
end

local hold = 0
-- All environments' quarantined requests come before any environment's other work, which would never let them be alone.
for _, environment in ipairs(environments) do
  local r = want > 0 and quarantined(environment)
  if r then
    local isolating = P .. ':isolating:' .. environment
    local holder = call('GET', isolating)
    if busy == 0 then
      call('LPOP', P .. ':quarantined:' .. environment)
      take(r, true)
      -- Its like follow it at once, or each of them would empty a worker.
      quarantined(environment)
      if holder == worker then call('DEL', isolating) end
      want = 0
    elseif not holder or holder == worker then
      -- It ends soon after the worker ceases to ask, and not while it still empties itself.
      call('SET', isolating, worker, 'PX', 2 * lease_ms)
      hold, want = 1, 0
    end
  end
end
local redeemed = 0
if pinned then
  recall_overdue()
  redeemed = redeem()
end
for _, environment in ipairs(environments) do
  if want > 0 then want = claim(environment, want) end
end
local again = 0
if pinned then
  recall(worker)
  if want > 0 then call('HSET', P .. ':vacant', worker, want) end
  for environment in pairs(pinning) do
    local wait = watch(environment, redeemed)
    if wait > 0 then again = again > 0 and math.min(again, wait) or wait end
  end
end

if #leases > 0 then
  bulk('HSET', WHERE, places)
  bulk('ZADD', work, leases)
  count('claimed', #leases / 2)
  for environment, n in pairs(taken_in) do count('waiting:' .. environment, -n) end
end
if #leases > 0 or pops >= MOST_POPS or hold == 1 then
  -- Whoever leaves work behind wakes the next idle worker.
  for _, environment in ipairs(environments) do
    local name = 'waiting:' .. environment
    if tonumber(call('HGET', STATS, name) or 0) + (counts[name] or 0) > 0 and has_line(environment) then
      notify(environment, 1)
    end
  end
end
return {acks, jobs, conclude(), hold, again, now, pinned and 1 or 0}
