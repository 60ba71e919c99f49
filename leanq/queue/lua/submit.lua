#!lua
-- submit(batch): takes requests in, or says why not. Idempotent by request id.
-- Without allow-oom: a full memory refuses the whole call and so becomes back-pressure.
-- ARGV: client, most that may wait per environment and tenant,
--       time-to-live of replies (ms) where remembered verdicts count, else 0, then per request
--       request id, kind, tenant, digest or '', body; a kind, which most requests share, is a line each of
--       environment, priority, deadline in the queue (ms from now, 0: none), longest run (ms),
--       affinities (the strongest first, between spaces)
-- Returns per request: 1 queued or attached to one that runs, 2 already in flight (the client is attached to it),
--       3 the tenant's environment is full, 4 no worker ever offered this environment, or the reply itself.
local client, most, remember = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3])
local now = now_ms()
note_minute(now)
local out, environments, kinds, rings = {}, {}, {}, {}
-- By request id, where in the batch it stands first, and where those stand that are there again.
local first, twice = {}, {}
local names, runs, digested, asked = {}, {}, {}, {}
local records, count, remembered = {}, 0, 0
local any_paused = call('EXISTS', PAUSED) == 1

-- The record of the k-th, which is written with the others.
local function keep(k, kind)
  local n, i = #records, 5 * k
  records[n + 1] = names[k]
  records[n + 2] = kind.head .. ARGV[i + 1] .. '\0' .. ARGV[i + 2] .. '\0' .. ARGV[i + 3]
end

-- What this call knows of an environment.
local function environment_of(name)
  local environment = environments[name]
  if not environment then
    environment = {added = 0, reserved = 0, attached = 0, pinned = false, open = nil,
      known = call('HEXISTS', P .. ':environments', name) == 1 or call('HLEN', P .. ':environments') == 0,
      print = remember > 0 and call('HGET', P .. ':prints', name),
      paused = any_paused and is_paused('e', name)}
    environments[name] = environment
  end
  return environment
end

-- What all requests of a kind have in common: where they wait, and how their records begin.
local function read_kind(text)
  local name, priority, deadline, run, affinities =
    string.match(text, '^(.-)\n(.-)\n(.-)\n(.-)\n(.*)$')
  deadline = tonumber(deadline)
  local place = name .. ':' .. priority
  if not rings[place] then
    rings[place] = {line = place, key = P .. ':ring:' .. place, wait = P .. ':wait:' .. place .. ':',
      environment = environment_of(name), lines = {}, tenants = {}}
    rings[#rings + 1] = rings[place]
  end
  -- All but tenant and digest, and the zero bytes that end these.
  local head = struct.pack(LAYOUT, VERSION, 0, tonumber(priority), now,
    deadline > 0 and now + deadline or 0, tonumber(run), name, client, affinities, '', '')
  local kind = {name = name, environment = environment_of(name), ring = rings[place], affinities = affinities,
    head = string.sub(head, 1, -3)}
  kinds[text] = kind
  return kind
end

-- The reply that an identical request got in the environment as it is now.
local function remembered_reply(environment, digest)
  return environment.print and call('GET', P .. ':verdict:' .. environment.print .. ':' .. digest)
end

-- Loose pinning: what a warm and idle worker is reserved enters no line.
local reserved_workers = {}

-- From now on claims of this environment look for what they are warm for, also among what comes back.
local function pin(name, environment)
  if not environment.pinned then call('HSETNX', P .. ':pinning', name, '0 ') end
  environment.pinned = true
end

-- The worker to be reserved a request: idle, and warm for the strongest affinity possible. None
-- where something else waits in the environment, which has the first claim to any idle worker.
local function warm_worker(name, environment, affinities)
  if environment.open == nil then environment.open = not environment.paused and not has_line(name) end
  if not environment.open then return nil end
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

local function reservation(request_id, environment, worker)
  call('HSET', WHERE, request_id, 'p' .. worker)
  call('HINCRBY', P .. ':vacant', worker, -1)
  call('ZADD', P .. ':reservations', 'NX', now + REASSIGN_MS, worker)
  -- The claim that takes the first takes all.
  if call('RPUSH', P .. ':reservation:' .. worker, request_id) == 1 then
    call('RPUSH', P .. ':stop:' .. worker, '+')
  end
  environment.reserved = environment.reserved + 1
  reserved_workers[worker] = true
end

-- Wakes another worker to watch over reservations, unless one does so already. Nobody watches over
-- reservations to himself: they would be forgotten if he died.
local function post_watchdog(name)
  local ends, watchdog = string.match(call('HGET', P .. ':pinning', name), '^(%d+) (.*)$')
  if tonumber(ends) > now and not reserved_workers[watchdog] then return end
  call('HSET', P .. ':pinning', name, now + REASSIGN_MS .. ' ')
  if call('ZCARD', P .. ':workers') > 1 then notify(name, 1) end
end

-- One that is there already: in flight, or ended.
local function again(request_id)
  local place, r = call('HGET', WHERE, request_id), record(request_id)
  if not r then return call('GET', REQ .. request_id) end
  hand_over(request_id, r, client, place)
  return 2
end

-- One that is new to the server, and simply waits in its line, where there is room.
local function line_up(k, kind)
  local ring, tenant = kind.ring, ARGV[5 * k + 1]
  local line = ring.lines[tenant]
  if not line then
    line = {}
    ring.lines[tenant], ring.tenants[#ring.tenants + 1] = line, tenant
  end
  line[#line + 1] = k
  kind.environment.open = false
  return 1
end

-- One that is new to the server, and may have others like it, or somebody who is warm for it.
local function take_in(k, kind, leader, held)
  local request_id, digest, environment = ARGV[5 * k - 1], ARGV[5 * k + 2], kind.environment
  local run = read_lease(held)
  if run then
    -- It was withdrawn, its reply has gone, and it runs on for others: now for this client as well.
    keep(k, kind)
    lease_to(request_id, run, client)
    return 2
  end
  local reply = digest ~= '' and remembered_reply(environment, digest)
  if reply then
    call('SET', names[k], reply, 'PX', remember)
    remembered = remembered + 1
    return reply
  end
  local attached, warm = attach(request_id, leader, digest, now), nil
  if kind.affinities ~= '' then
    pin(kind.name, environment)
    local held = any_paused and is_paused('t', ARGV[5 * k + 1])
    warm = not attached and not held and warm_worker(kind.name, environment, kind.affinities)
  end
  if not attached and not warm then return line_up(k, kind) end
  if warm then reservation(request_id, environment, warm) else environment.attached = environment.attached + 1 end
  keep(k, kind)
  return 1
end

-- Puts the k-th, and so on, at the end of a tenant's line; those that find no room are refused.
-- Whether the line was empty before.
local function extend(ring, tenant, line)
  local wait, length = ring.wait .. tenant, 0
  if #line == 1 then
    length = call('RPUSH', wait, ARGV[5 * line[1] - 1])
  else
    local request_ids = {}
    for i, k in ipairs(line) do request_ids[i] = ARGV[5 * k - 1] end
    for i = 1, #request_ids, 4000 do
      length = call('RPUSH', wait, unpack(request_ids, i, math.min(i + 3999, #request_ids)))
    end
  end
  local taken = #line
  if length > most then
    taken = math.max(0, taken - (length - most))
    call('RPOP', wait, #line - taken)
  end
  for i, k in ipairs(line) do
    if i <= taken then keep(k, kinds[ARGV[5 * k]]) else out[k] = 3 end
  end
  ring.environment.added = ring.environment.added + taken
  return length == #line and taken > 0
end

-- What the server knows of them, all at once. Hardly ever is a request id there already.
for k = 1, (#ARGV - 3) / 5 do
  local i = 5 * k - 1
  names[k] = REQ .. ARGV[i]
  if ARGV[i + 3] ~= '' then
    local kind = kinds[ARGV[i + 1]] or read_kind(ARGV[i + 1])
    runs[#runs + 1] = run_of(kind.name, ARGV[i + 3])
    digested[#digested + 1] = ARGV[i]
    asked[k] = #runs
  end
end
local any = existing(names)
local leaders, helds = bulk('HMGET', RUNS, runs), bulk('HMGET', WHERE, digested)

for k, name in ipairs(names) do
  local i = 5 * k - 1
  local request_id = ARGV[i]
  if first[request_id] then
    twice[k] = first[request_id]
  else
    first[request_id] = k
    local kind = kinds[ARGV[i + 1]] or read_kind(ARGV[i + 1])
    if any > 0 and call('EXISTS', name) == 1 then
      out[k] = again(request_id)
    elseif not kind.environment.known then
      out[k] = 4
    elseif asked[k] or kind.affinities ~= '' then
      local n = asked[k]
      out[k] = take_in(k, kind, n and leaders[n], n and helds[n])
    else
      out[k] = line_up(k, kind)
    end
  end
end
for _, ring in ipairs(rings) do
  local opened = {}
  for _, tenant in ipairs(ring.tenants) do
    if extend(ring, tenant, ring.lines[tenant]) then
      if any_paused then give_turn('RPUSH', ring.line, tenant)
      else opened[#opened + 1] = tenant end
    end
  end
  bulk('RPUSH', ring.key, opened)
end
for k, other in pairs(twice) do out[k] = out[other] == 1 and 2 or out[other] end
bulk('MSET', nil, records)
if remembered > 0 then call('HINCRBY', STATS, 'remembered', remembered) end
for name, environment in pairs(environments) do
  local waiting = environment.added + environment.reserved
  local taken = waiting + environment.attached
  count = count + taken
  if waiting > 0 then call('HINCRBY', STATS, 'waiting:' .. name, waiting) end
  if taken > 0 then call('HINCRBY', TALLY, 's:' .. name, taken) end
  if environment.added > 0 and not environment.paused then notify(name, environment.added) end
  if environment.reserved > 0 then post_watchdog(name) end
end
if count > 0 then call('HINCRBY', STATS, 'submitted', count) end
return out
