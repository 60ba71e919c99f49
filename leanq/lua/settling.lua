-- The first half of claim, which is sent as this text followed by its own: what workers have finished.
-- ARGV: see claim.
local worker, lease_ms, ttl, nonce = ARGV[1], tonumber(ARGV[2]), ARGV[3], ARGV[4]
local want, busy, max_attempts = tonumber(ARGV[5]), tonumber(ARGV[6]), tonumber(ARGV[7])
local remember, results = tonumber(ARGV[8]), tonumber(ARGV[9])
local first_lane = 10 + 4 * results
-- The workers that are remembered as warm for one thing, and for how long after the last settled
-- it: longer than anybody keeps a process for work that does not come.
local MOST_WARM, WARM_MS = 16, 180000
local now = now_ms()
local work = P .. ':work:' .. worker
local told, counts = {}, {}
local function count(name, n) counts[name] = (counts[name] or 0) + n end

-- Notes that the worker is warm for the strongest of the request's affinities, while it is still
-- there to be asked. The weaker ones say who else would do, and others are warm for them.
local function note_warm(rid, run)
  local r = record(one_like(rid, run))
  local name = r and string.match(r.affinities, '%S+')
  if name then
    local warm = P .. ':warm:' .. r.lane .. ':' .. name
    call('ZADD', warm, now, worker)
    call('ZREMRANGEBYRANK', warm, 0, -1 - MOST_WARM)
    call('PEXPIRE', warm, WARM_MS)
  end
end

-- Most results of one call tell the same of themselves, and most leases of one call differ in their
-- tokens alone; each is read once.
local abouts, tails = {}, {}
local function read_about(text)
  local outcome, warm, way, fingerprint = string.match(text, '^(%S*) (%S*) (%S*) (%S*)$')
  abouts[text] = {outcome = 'verdict:' .. outcome, warm = warm == '1', print = fingerprint,
    way = way ~= '' and 'way:' .. way}
  return abouts[text]
end
local function read_tail(text)
  local tail = read_lease('l\0' .. text)
  tails[text] = tail
  return tail
end

-- What is settled, and of that what others may wait for.
local done, shared = {}, {}

-- Whether the result counts: its lease is current, or it has counted before.
local function settle(rid, token, reply, text, place)
  local head = 'l' .. token .. '\0'
  if not place or string.sub(place, 1, #head) ~= head or done[rid] then
    -- 0x93 opens an array of three, 0xa0 + n a text of n bytes: the token is in the reply's head.
    head = '\147' .. string.char(160 + #token) .. token
    if call('GETRANGE', REQ .. rid, 0, #head - 1) == head then return 1 end
    count('fenced', 1)
    return 0
  end
  place = string.sub(place, #head + 1)
  local run, about = tails[place] or read_tail(place), abouts[text] or read_about(text)
  if about.warm then note_warm(rid, run) end
  -- One without a client was withdrawn before, by its own.
  if run.client ~= '' then
    answer(rid, run.client, reply, ttl, told)
    count(about.outcome, 1)
  end
  done[#done + 1], done[rid] = rid, true
  if about.way then count(about.way, 1) end
  if run.digest ~= '' then
    if remember > 0 and about.print ~= '' then
      call('SET', P .. ':verdict:' .. about.print .. ':' .. run.digest, reply, 'PX', remember)
    end
    shared[#shared + 1] = {rid = rid, reply = reply, outcome = about.outcome,
      run = run_of(run.lane, run.digest), with = P .. ':with:' .. rid}
  end
  return 1
end

-- Ends what followed the results, and the runs that took more.
local function end_runs()
  local runs, withs, over = {}, {}, {}
  for i, item in ipairs(shared) do runs[i], withs[i] = item.run, item.with end
  for i, leader in ipairs(bulk('HMGET', RUNS, runs)) do
    if leader == shared[i].rid then over[#over + 1] = runs[i] end
  end
  bulk('HDEL', RUNS, over)
  -- Hardly ever did anybody follow.
  for i = 1, #withs, 4000 do
    local last = math.min(i + 3999, #withs)
    if call('EXISTS', unpack(withs, i, last)) > 0 then
      for k = i, last do
        local ended = share(shared[k].rid, shared[k].reply, max_attempts, now, ttl, told)
        count('coalesced', ended)
        count(shared[k].outcome, ended)
      end
    end
  end
end

-- Settles all results; per result 1, or 0 where it was fenced.
local function settle_all()
  local acks, rids = {}, {}
  for i = 10, first_lane - 1, 4 do rids[#rids + 1] = ARGV[i] end
  for k, place in ipairs(bulk('HMGET', WHERE, rids)) do
    local i = 6 + 4 * k
    acks[k] = settle(ARGV[i], ARGV[i + 1], ARGV[i + 2], ARGV[i + 3], place)
  end
  if #done > 0 then
    bulk('HDEL', WHERE, done)
    bulk('ZREM', work, done)
    count('settled', #done)
    if #shared > 0 then end_runs() end
  end
  return acks
end
