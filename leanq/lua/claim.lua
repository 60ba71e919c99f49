#!lua flags=allow-oom
-- settle(batch) and claim(n) in one call; either part may be empty.
-- settle: accepted only with the current token, or again with the token that already won.
-- claim: up to n requests into the worker's processing list, each with a fresh lease token;
--   tenants in round-robin within a level, levels without starvation, suspects alone; first what
--   the worker was promised, and of a tenant's next ones those that it is warm for.
-- ARGV: worker, lease (ms), time-to-live of replies (ms), nonce of this call, n wanted,
--   n in flight besides those settled here (other than 0 keeps suspects away),
--   most attempts, how long verdicts are remembered (ms), count of results,
--   (rid, token, reply, about) per result, then the lanes. About, which most results share:
--   outcome, 1 where the worker is warm for it now, the way in which Lean came by its prefix or '',
--   fingerprint or '', with a space between.
-- Returns {per result 1 or 0 (fenced), per request four values: rid, about, submitted (ms), body,
--   size of the processing list, 1 where this worker should empty itself for a suspect,
--   after how many ms it should claim again, to watch over others' promises (0: it need not), now (ms)}.
--   About: attempts, 1 where it runs alone, lane. The n-th request has the token NONCEn, from 0.
-- Warm requests among so many at the front of a tenant's line go first. Nothing is passed over
-- later than so long after it first was, however many warm ones come up.
local WINDOW, PASS_MS, COLD = 16, 2000, 3
local acks = settle_all()

-- What was withdrawn is popped as well, so that one call takes bounded time.
local MOST_POPS = 1000
local pops, jobs, leases, taken = 0, {}, {}, {}

-- Per lane in which some requests name affinities, who watches over promises there and until when.
local pinning = {}
if first_lane <= #ARGV then
  local notes = call('HMGET', P .. ':pinning', unpack(ARGV, first_lane))
  for i, note in ipairs(notes) do pinning[ARGV[first_lane + i - 1]] = note or nil end
end
local pinned = next(pinning) ~= nil

-- Those of the requests that wait in this lane. Not what expires hereby, nor what was withdrawn: its
-- rid stays in the list, since LREM is slow on long ones.
local function waiting(lane, rids)
  local names, found = {}, {}
  for i, rid in ipairs(rids) do names[i] = REQ .. rid end
  local texts, places = bulk('MGET', nil, names), bulk('HMGET', WHERE, rids)
  for i, rid in ipairs(rids) do
    local place = places[i]
    local passed = place and string.match(place, '^q(.*)')
    local r = (not place or passed) and not taken[rid] and read_record(texts[i])
    if not r or r.lane ~= lane then
      -- Withdrawn, and perhaps sent again since.
    elseif is_late(r, now) then
      expire(rid, r, r.n, now, ttl, told)
      taken[rid] = true
    else
      r.rid, r.text, r.passed = rid, texts[i], tonumber(passed)
      found[#found + 1] = r
    end
  end
  return found
end

-- Whether a request that waits needs no run of its own, since an identical one runs.
local function follow(r, suspect)
  if r.digest == '' then return false end
  local leader = call('HGET', RUNS, run_of(r.lane, r.digest))
  if not attach(r.rid, leader, r.digest, r.at, suspect) then return false end
  taken[r.rid] = true
  count('waiting:' .. r.lane, -1)
  return true
end

local warmth = {}
-- How warm the worker is: 1 for the strongest of the affinities, 2 for the next; nil if it is not.
local function warm_for(r)
  local rank = 0
  for name in string.gmatch(r.affinities, '%S+') do
    local warm = P .. ':warm:' .. r.lane .. ':' .. name
    if warmth[warm] == nil then warmth[warm] = call('ZSCORE', warm, worker) end
    rank = rank + 1
    if warmth[warm] then return rank end
  end
  return nil
end

-- Whether the request, which waits, is now this worker's.
local function take(r, alone)
  if follow(r, alone) then return false end
  local rid, number = r.rid, #leases / 2
  local solo = ''
  if r.digest ~= '' then
    call('HSET', RUNS, run_of(r.lane, r.digest), rid)
    solo = alone and '1' or ''
  end
  pending[rid] = lease(nonce .. number, worker, r.client, r.lane, solo, r.digest)
  if r.affinities ~= '' then count(warm_for(r) and 'warm_hits' or 'warm_misses', 1) end
  leases[2 * number + 1], leases[2 * number + 2] = now + r.run, rid
  local at = 4 * number
  jobs[at + 1] = rid
  jobs[at + 2] = r.n + 1 .. (alone and ' 1 ' or ' 0 ') .. r.lane
  jobs[at + 3] = r.at
  jobs[at + 4] = string.sub(r.text, r.from)
  taken[rid] = true
  count('waiting:' .. r.lane, -1)
  return true
end

-- Up to n requests of one tenant's line in a lane where some name affinities: the warmest of the
-- next ones, in their order otherwise. The rest of what was popped goes back to the front.
local function choose(wait, lane, n)
  local line, got, dry = {}, 0, false
  while got < n do
    while #line < WINDOW and not dry and pops < MOST_POPS do
      local rids = call('LPOP', wait, n - got + WINDOW - 1 - #line) or {}
      dry = #rids == 0
      pops = pops + #rids
      for _, r in ipairs(waiting(lane, rids)) do
        -- One that was withdrawn and sent again stands there twice.
        if not line[r.rid] then line[#line + 1], line[r.rid] = r, true end
      end
    end
    local best
    for i = 1, math.min(WINDOW, #line) do
      local r = line[i]
      r.rank = r.rank or (r.affinities ~= '' and warm_for(r) or COLD)
      if not best or r.rank < line[best].rank then best = i end
      if line[best].rank == 1 or r.passed and now - r.passed >= PASS_MS then break end
    end
    if not best then break end
    for i = 1, best - 1 do
      if not line[i].passed then
        call('HSET', WHERE, line[i].rid, 'q' .. now)
        line[i].passed = now
      end
    end
    if take(table.remove(line, best), false) then got = got + 1 end
  end
  local rest = {}
  for i = #line, 1, -1 do rest[#rest + 1] = line[i].rid end
  bulk('LPUSH', wait, rest)
  return got
end

-- Which of the lists are not empty; asked for all at once, since mostly all are, or none is.
local function filled(lists)
  local full = {}
  local n = #lists > 0 and call('EXISTS', unpack(lists)) or 0
  for i, list in ipairs(lists) do
    full[i] = n == #lists or n > 0 and call('EXISTS', list) == 1
  end
  return full
end

-- Up to n requests of one level; tenants give in turn, and several each where they are few.
local function draw(lane, level, n)
  local ring = P .. ':ring:' .. lane .. ':' .. level
  local got = 0
  while got < n and pops < MOST_POPS do
    local tenants = call('LPOP', ring, n - got)
    if not tenants then break end
    local each = math.floor((n - got) / #tenants)
    local lists, rids, keep = {}, {}, {}
    for i, tenant in ipairs(tenants) do
      local wait = P .. ':wait:' .. lane .. ':' .. level .. ':' .. tenant
      lists[i] = wait
      if pinning[lane] then
        got = got + choose(wait, lane, each)
      else
        for _, rid in ipairs(call('LPOP', wait, each) or {}) do rids[#rids + 1] = rid end
      end
    end
    pops = pops + #rids
    for _, r in ipairs(#rids > 0 and waiting(lane, rids) or {}) do
      if not taken[r.rid] and take(r, false) then got = got + 1 end
    end
    for i, full in ipairs(filled(lists)) do
      if full then keep[#keep + 1] = tenants[i] end
    end
    if #keep > 0 then call('RPUSH', ring, unpack(keep)) end
  end
  return got
end

-- Seven picks of eight go to the most urgent level that has work; the eighth goes round the levels.
local function claim(lane, n)
  local turn = tonumber(call('HGET', STATS, 'turn:' .. lane) or 0)
  local started, levels = turn, {}
  for level = 0, LEVELS - 1 do
    if call('EXISTS', P .. ':ring:' .. lane .. ':' .. level) == 1 then levels[#levels + 1] = level end
  end
  while n > 0 and #levels > 0 do
    local place = turn % 8
    local first, most = 0, math.min(n, 7 - place)
    -- Where but one level has work, all picks are its own.
    if #levels == 1 then first, most = levels[1], n
    elseif place == 7 then first, most = math.floor(turn / 8) % LEVELS, 1 end
    local got = draw(lane, first, most)
    for _, level in ipairs(levels) do
      if got < most and level ~= first then got = got + draw(lane, level, most - got) end
    end
    if got == 0 then break end
    turn, n = turn + got, n - got
  end
  if turn > started then call('HSET', STATS, 'turn:' .. lane, turn) end
  return n
end

-- The first suspect of a lane that still waits for a run of its own.
local function suspect(lane)
  local suspects = P .. ':suspects:' .. lane
  local rid = call('LINDEX', suspects, 0)
  while rid do
    local r = waiting(lane, {rid})[1]
    if r and not follow(r, true) then return r end
    call('LPOP', suspects)
    rid = call('LINDEX', suspects, 0)
  end
  return nil
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
    if call('HGET', WHERE, rid) == 'p' .. worker then
      call('HDEL', WHERE, rid)
      local known = record(rid)
      local r = known and waiting(known.lane, {rid})[1]
      if r and take(r, false) then got, want = got + 1, want - 1 end
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
  local r = want > 0 and suspect(lane)
  if r then
    local isolating = P .. ':isolating:' .. lane
    local holder = call('GET', isolating)
    if busy == 0 then
      call('LPOP', P .. ':suspects:' .. lane)
      take(r, true)
      -- Its like follow it at once, or each of them would empty a worker.
      suspect(lane)
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

if #leases > 0 then
  local places = {}
  for rid, place in pairs(pending) do places[#places + 1] = rid; places[#places + 1] = place end
  bulk('HSET', WHERE, places)
  bulk('ZADD', work, leases)
  count('claimed', #leases / 2)
end
if #leases > 0 or pops >= MOST_POPS or hold == 1 then
  -- Whoever leaves work behind wakes the next idle worker.
  for i = first_lane, #ARGV do
    local name = 'waiting:' .. ARGV[i]
    if tonumber(call('HGET', STATS, name) or 0) + (counts[name] or 0) > 0
      and (not pinning[ARGV[i]] or has_line(ARGV[i])) then
      ring_bell(ARGV[i], 1)
    end
  end
end
tell(told, ttl)
for name, n in pairs(counts) do
  if n ~= 0 then call('HINCRBY', STATS, name, n) end
end
call('ZADD', P .. ':workers', now + lease_ms, worker)
return {acks, jobs, call('ZCARD', work), hold, again, now}
