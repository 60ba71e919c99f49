#!lua
-- submit(batch): takes requests in, or says why not. Idempotent by rid.
-- Without allow-oom: a full memory refuses the whole call and so becomes back-pressure.
-- ARGV: client, most that may wait per lane and tenant,
--       time-to-live of replies (ms) where remembered verdicts count, else 0, then per request
--       rid, place, digest or '', body; a place, which most requests share, is a line each of
--       lane, tenant, level, deadline in the queue (ms from now, 0: none), longest run (ms),
--       affinities (the strongest first, between spaces)
-- Returns per request: 1 queued or attached to one that runs, 2 already in flight (the client is attached to it),
--       3 the tenant's lane is full, 4 no worker ever offered this lane, or the reply itself.
local client, most, remember = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3])
local now = now_ms()
local out, lanes, places, lines, seen = {}, {}, {}, {}, {}
local names, runs, digested, asked = {}, {}, {}, {}
local records, count, remembered = {}, 0, 0

local function keep(name, place, digest, body)
  local n = #records
  records[n + 1], records[n + 2] = name, place.head .. digest .. '\0' .. body
end

-- What this call knows of a lane.
local function lane_of(name)
  local lane = lanes[name]
  if not lane then
    lane = {added = 0, promised = 0, pinned = false, open = nil,
      known = call('HEXISTS', P .. ':lanes', name) == 1 or call('HLEN', P .. ':lanes') == 0,
      print = remember > 0 and call('HGET', P .. ':prints', name)}
    lanes[name] = lane
  end
  return lane
end

-- What all requests of a place have in common: where they wait, and how their records begin.
local function read_place(text)
  local name, tenant, level, deadline, run, affinities =
    string.match(text, '^(.-)\n(.-)\n(.-)\n(.-)\n(.-)\n(.*)$')
  deadline = tonumber(deadline)
  local ring = P .. ':ring:' .. name .. ':' .. level
  local key = P .. ':wait:' .. name .. ':' .. level .. ':' .. tenant
  local line = lines[key]
  if not line then
    line = {key = key, ring = ring, tenant = tenant, lane = lane_of(name), rids = {}, room = nil}
    lines[key] = line
  end
  -- All but the digest, and the zero byte that ends it.
  local head = struct.pack(LAYOUT, VERSION, 0, tonumber(level), now,
    deadline > 0 and now + deadline or 0, tonumber(run), name, tenant, client, affinities, '')
  local place = {name = name, lane = lane_of(name), line = line, affinities = affinities,
    head = string.sub(head, 1, -2)}
  places[text] = place
  return place
end

-- How many more fit into a line.
local function room_in(line)
  if not line.room then line.room = most - call('LLEN', line.key) end
  return line.room
end

-- The reply that an identical request got in the environment as it is now.
local function remembered_reply(lane, digest)
  return lane.print and call('GET', P .. ':verdict:' .. lane.print .. ':' .. digest)
end

-- Loose pinning: what a warm and idle worker is promised enters no line.
local promisees = {}

-- From now on claims of this lane look for what they are warm for, also among what comes back.
local function pin(name, lane)
  if not lane.pinned then call('HSETNX', P .. ':pinning', name, '0 ') end
  lane.pinned = true
end

-- The worker to be promised a request: idle, and warm for the strongest affinity possible. None
-- where something else waits in the lane, which has the first claim to any idle worker.
local function warm_worker(name, lane, affinities)
  if lane.open == nil then lane.open = not has_line(name) end
  if not lane.open then return nil end
  for affinity in string.gmatch(affinities, '%S+') do
    local workers = call('ZREVRANGE', P .. ':warm:' .. name .. ':' .. affinity, 0, -1)
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
  call('HSET', WHERE, rid, 'p' .. worker)
  call('HINCRBY', P .. ':vacant', worker, -1)
  call('ZADD', P .. ':promises', 'NX', now + STEAL_MS, worker)
  -- The claim that takes the first takes all.
  if call('RPUSH', P .. ':promise:' .. worker, rid) == 1 then
    call('RPUSH', P .. ':stop:' .. worker, '+')
  end
  lane.promised = lane.promised + 1
  promisees[worker] = true
end

-- Wakes another worker to watch over promises, unless one does so already. Nobody watches over
-- promises to himself: they would be forgotten if he died.
local function post_guard(name)
  local ends, guard = string.match(call('HGET', P .. ':pinning', name), '^(%d+) (.*)$')
  if tonumber(ends) > now and not promisees[guard] then return end
  call('HSET', P .. ':pinning', name, now + STEAL_MS .. ' ')
  if call('ZCARD', P .. ':workers') > 1 then ring_bell(name, 1) end
end

-- One that is there already: in flight, or ended.
local function again(rid)
  local place, r = call('HGET', WHERE, rid), record(rid)
  if not r then return call('GET', REQ .. rid) end
  hand_over(rid, r, client, place)
  return 2
end

-- One that is new to the server, and simply waits in its line, if there is room. Records are written
-- when all are decided.
local function line_up(rid, name, place, digest, body)
  local line = place.line
  if room_in(line) <= 0 then return 3 end
  keep(name, place, digest, body)
  local n = #line.rids
  if n == 0 then lines[#lines + 1] = line end
  line.rids[n + 1] = rid
  line.room = line.room - 1
  line.lane.open = false
  return 1
end

-- One that is new to the server, and may have others like it, or somebody who is warm for it.
local function take_in(rid, place, digest, body, leader, held)
  local name, lane, line = place.name, place.lane, place.line
  local run = read_lease(held)
  if run then
    -- It was withdrawn, its reply has gone, and it runs on for others: now for this client as well.
    keep(REQ .. rid, place, digest, body)
    call('HSET', WHERE, rid, lease(run.token, run.worker, client, run.lane, run.solo, run.digest))
    return 2
  end
  local reply = digest ~= '' and remembered_reply(lane, digest)
  if reply then
    call('SET', REQ .. rid, reply, 'PX', remember)
    remembered = remembered + 1
    return reply
  end
  local attached = attach(rid, leader, digest, now)
  if not attached and room_in(line) <= 0 then return 3 end
  local warm
  if place.affinities ~= '' then
    pin(name, lane)
    warm = not attached and warm_worker(name, lane, place.affinities)
  end
  if not attached and not warm then return line_up(rid, REQ .. rid, place, digest, body) end
  if warm then promise(rid, lane, warm) end
  keep(REQ .. rid, place, digest, body)
  count = count + 1
  return 1
end

-- What the server knows of them, all at once. Hardly ever is a rid there already.
for i = 4, #ARGV, 4 do
  names[#names + 1] = REQ .. ARGV[i]
  if ARGV[i + 2] ~= '' then
    local place = places[ARGV[i + 1]] or read_place(ARGV[i + 1])
    runs[#runs + 1] = run_of(place.name, ARGV[i + 2])
    digested[#digested + 1] = ARGV[i]
    asked[i] = #runs
  end
end
local any = 0
for i = 1, #names, 4000 do
  any = any + call('EXISTS', unpack(names, i, math.min(i + 3999, #names)))
end
local leaders, helds = bulk('HMGET', RUNS, runs), bulk('HMGET', WHERE, digested)

for k, name in ipairs(names) do
  local i = 4 * k
  local rid, answer = ARGV[i], nil
  if seen[rid] then
    answer = seen[rid] == 1 and 2 or seen[rid]
  elseif any > 0 and call('EXISTS', name) == 1 then
    answer = again(rid)
  else
    local place, digest = places[ARGV[i + 1]] or read_place(ARGV[i + 1]), ARGV[i + 2]
    local n = asked[i]
    if not place.lane.known then
      answer = 4
    elseif n or place.affinities ~= '' then
      answer = take_in(rid, place, digest, ARGV[i + 3], n and leaders[n], n and helds[n])
    else
      answer = line_up(rid, name, place, digest, ARGV[i + 3])
    end
  end
  seen[rid] = answer
  out[k] = answer
end
bulk('MSET', nil, records)
for _, line in ipairs(lines) do
  for i = 1, #line.rids, 4000 do
    local last = math.min(i + 3999, #line.rids)
    if call('RPUSH', line.key, unpack(line.rids, i, last)) == last - i + 1 then
      call('RPUSH', line.ring, line.tenant)
    end
  end
  line.lane.added = line.lane.added + #line.rids
end
if remembered > 0 then call('HINCRBY', STATS, 'remembered', remembered) end
for name, lane in pairs(lanes) do
  local waiting = lane.added + lane.promised
  count = count + lane.added
  if waiting > 0 then call('HINCRBY', STATS, 'waiting:' .. name, waiting) end
  if lane.added > 0 then ring_bell(name, lane.added) end
  if lane.promised > 0 then post_guard(name) end
end
if count > 0 then call('HINCRBY', STATS, 'submitted', count) end
return out
