-- The first half of claim, which is sent as this text followed by its own: what workers have finished.
-- ARGV: see claim.
local worker, lease_ms, ttl, token = ARGV[1], tonumber(ARGV[2]), ARGV[3], ARGV[4]
local want, busy, max_attempts = tonumber(ARGV[5]), tonumber(ARGV[6]), tonumber(ARGV[7])
local remember, results = tonumber(ARGV[8]), tonumber(ARGV[9])
local first_environment = 10 + 4 * results
-- The workers that are remembered as warm for one thing, and for how long after the last settled
-- it: longer than anybody keeps a process for work that does not come.
local MOST_WARM, WARM_MS = 16, 180000
local now = now_ms()
local work = P .. ':work:' .. worker
local told, counts, tallies = {}, {}, {}
local function count(name, n) counts[name] = (counts[name] or 0) + n end

-- Notes that the worker is warm for the strongest of the request's affinities, while it is still
-- there to be asked. The weaker ones say who else would do, and others are warm for them.
local function note_warm(request_id, run)
  local r = record(one_like(request_id, run))
  local name = r and string.match(r[AFFINITIES], '%S+')
  if name then
    local warm = P .. ':warm:' .. r[ENVIRONMENT] .. ':' .. name
    call('ZADD', warm, now, worker)
    call('ZREMRANGEBYRANK', warm, 0, -1 - MOST_WARM)
    call('PEXPIRE', warm, WARM_MS)
  end
end

-- Most results of one call tell the same of themselves, and most leases of one call are the same; each
-- is read once.
local abouts, runs = {}, {}
local function read_about(text)
  local outcome, warm, way, fingerprint, environment, times =
    string.match(text, '^(%S*) (%S*) (%S*) (%S*) ?(%S*) ?(%S*)$')
  abouts[text] = {outcome = outcome, warm = warm == '1', print = fingerprint,
    way = way ~= '' and 'way:' .. way, environment = environment, times = times, settled = 0, ended = 0}
  return abouts[text]
end
local function run_in(place)
  if runs[place] == nil then runs[place] = read_lease(place) or false end
  return runs[place]
end

-- What is settled, and of that what others may wait for.
local done, shared = {}, {}

-- Whether a result counted before: its token is in the head of the reply.
local function has_counted(request_id, token)
  -- 0x93 opens an array of three, 0xa0 + n a text of n bytes.
  local head = '\147' .. string.char(160 + #token) .. token
  return call('GETRANGE', REQ .. request_id, 0, #head - 1) == head
end

-- Whether the result counts: its lease is current, or it has counted before.
local function settle(request_id, token, reply, text, place)
  local run, about = place and run_in(place), abouts[text] or read_about(text)
  if not run or run.token ~= token or done[request_id] then
    if has_counted(request_id, token) then return 1 end
    count('fenced', 1)
    return 0
  end
  if about.warm then note_warm(request_id, run) end
  -- One without a client was withdrawn before, by its own.
  if run.client ~= '' then
    answer(request_id, run.client, reply, ttl, told)
    about.ended = about.ended + 1
  end
  done[#done + 1], done[request_id] = request_id, true
  about.settled = about.settled + 1
  if run.digest ~= '' then
    if remember > 0 and about.print ~= '' then
      call('SET', P .. ':verdict:' .. about.print .. ':' .. run.digest, reply, 'PX', remember)
    end
    shared[#shared + 1] = {request_id = request_id, reply = reply, about = about,
      run = run_of(run.environment, run.digest), with = P .. ':with:' .. request_id}
  end
  return 1
end

-- Ends what followed the results, and the runs that took more.
local function end_runs()
  local runs, withs, over = {}, {}, {}
  for i, item in ipairs(shared) do runs[i], withs[i] = item.run, item.with end
  for i, leader in ipairs(bulk('HMGET', RUNS, runs)) do
    if leader == shared[i].request_id then over[#over + 1] = runs[i] end
  end
  bulk('HDEL', RUNS, over)
  -- Hardly ever did anybody follow.
  if existing(withs) == 0 then return end
  for _, item in ipairs(shared) do
    local ended = share(item.request_id, item.reply, max_attempts, now, ttl, told)
    count('coalesced', ended)
    item.about.ended = item.about.ended + ended
  end
end

-- Counts results in their environment: how many ended and how, and how long they waited, ran, and took.
local function tally_about(about)
  local ended = 'f:' .. about.environment .. ':' .. about.outcome
  tallies[ended] = (tallies[ended] or 0) + about.ended
  for what, ms, bucket in string.gmatch(about.times, '(%a)(%d+)/(%d+)') do
    local sum, cell = what .. '_ms:' .. about.environment, what .. ':' .. about.environment .. ':' .. bucket
    tallies[sum] = (tallies[sum] or 0) + ms * about.settled
    tallies[cell] = (tallies[cell] or 0) + about.settled
  end
end

-- Settles all results; per result 1, or 0 where it was fenced.
local function settle_all()
  local acks, request_ids = {}, {}
  for i = 10, first_environment - 1, 4 do request_ids[#request_ids + 1] = ARGV[i] end
  for k, place in ipairs(bulk('HMGET', WHERE, request_ids)) do
    local i = 6 + 4 * k
    acks[k] = settle(ARGV[i], ARGV[i + 1], ARGV[i + 2], ARGV[i + 3], place)
  end
  if #done > 0 then
    bulk('HDEL', WHERE, done)
    bulk('ZREM', work, done)
    count('settled', #done)
    if #shared > 0 then end_runs() end
    for _, about in pairs(abouts) do
      count('verdict:' .. about.outcome, about.ended)
      if about.way then count(about.way, about.settled) end
      if about.environment ~= '' then tally_about(about) end
    end
  end
  return acks
end
