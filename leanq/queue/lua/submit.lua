#!lua
-- parts: clock bulk record phase counters wait_list wakeup single_flight history hand_over known submit_time
-- submit: takes requests in, or says why not. Idempotent by request id. It has no allow-oom: a full memory
-- refuses the whole call, which becomes back-pressure.
-- `max_waiting`: per environment, priority and tenant. `remember_ms`: time-to-live of replies if remembered
-- verdicts count, else 0.
-- `kinds`: the fields that requests share: environment, priority, deadline_ms (from now, or 0), run_ms,
-- affinity (up to two names, the strongest first), detached. A request names its kind by number.
-- A detached request's body was uploaded for this call, whose name `upload` no other call has. Its row has
-- the body's size.
-- Returns the number of each request that is not simply queued or joined to a run, and what became of it.
--   `2`: in flight already, and the client now hears of its end. `3`: the tenant's list is full.
--   `4`: no worker ever offered this environment, and no scaler sizes it. `5`: in flight with other content.
--   Below 0: in flight, and its record is one of another release, of version -1 - answer. Else the reply.
-- Returns 0 if an upload is missing: the server had no memory for it, and nothing has changed.
local request_ids, kind_of = requests.request_id, requests.kind
local tenants, digests, bodies = requests.tenant, requests.digest, requests.body
-- Below, a request is its number in the call. `upload_of`: the keys of uploaded bodies.
local uploads, upload_of = {}, {}
for k, request_id in ipairs(upload ~= '' and request_ids or {}) do
  if kinds[kind_of[k]].detached then
    upload_of[k] = tag .. ':upload:' .. upload .. ':' .. request_id
    uploads[#uploads + 1] = upload_of[k]
  end
end
if bulk.existing(uploads) < #uploads then
  bulk.call('UNLINK', nil, uploads)
  return 0
end
note_minute()
local paused = redis.call('EXISTS', tag .. ':paused') == 1

-- `out`: by number, what became of each request that is not queued.
local names, out, records, kept, remembered = {}, {}, {}, 0, 0
local prefix = tag .. ':req:'
for k, request_id in ipairs(request_ids) do names[k] = prefix .. request_id end

-- Looks an environment up once in this call.
local environments = {}
local function environment_of(name)
  local environment = environments[name]
  if not environment then
    environment = {name = name, added = 0, may_start = 0, joined = 0, affinity = false,
      known = is_known(name),
      fingerprint = remember_ms > 0 and redis.call('HGET', tag .. ':fingerprints', name),
      paused = paused and wait_list.is_paused('e', name)}
    environments[name] = environment
  end
  return environment
end

-- Each kind's ring: an environment and priority, and the tenants with their new requests.
local rings = {}
for _, kind in ipairs(kinds) do
  kind.affinity, kind.second_affinity = kind.affinity[1] or '', kind.affinity[2] or ''
  local ring_name = kind.environment .. ':' .. kind.priority
  local environment = environment_of(kind.environment)
  if not rings[ring_name] then
    rings[ring_name] = {name = ring_name, environment = environment, tenants = {}, numbers = {}}
    rings[#rings + 1] = rings[ring_name]
  end
  kind.ring = rings[ring_name]
  -- The head has all fields but tenant and digest, and the zero bytes that end these.
  kind.head = string.sub(record.head({attempts = 0, priority = kind.priority, submitted = now,
    deadline = kind.deadline_ms > 0 and now + kind.deadline_ms or 0, run_ms = kind.run_ms,
    environment = kind.environment, client = client, affinity = kind.affinity,
    second_affinity = kind.second_affinity, lost = '', tenant = '', digest = '', detached = kind.detached}), 1, -3)
  kind.environment = environment
end

-- Keeps the record of a request, to be written with the others. Its body loses the time-to-live of uploads.
local function keep(k)
  if upload_of[k] then
    local body = record.body_key(request_ids[k])
    redis.call('RENAME', upload_of[k], body)
    redis.call('PERSIST', body)
  end
  kept = kept + 2
  records[kept - 1] = names[k]
  records[kept] = kinds[kind_of[k]].head .. tenants[k] .. '\0' .. digests[k] .. '\0' .. bodies[k]
end

-- Returns whether a request asks for something else than one of the same id. A request without a digest, as
-- an echo, equals any other in its environment.
local function differs(k, environment, digest)
  return kinds[kind_of[k]].environment.name ~= environment
    or (digests[k] ~= '' and digest ~= '' and digests[k] ~= digest)
end

-- Handles a request that is there already: it returns the reply, or makes this client hear of the end.
local function again(k)
  local request_id = request_ids[k]
  local phase_text, r, version = redis.call('HGET', tag .. ':phase', request_id), record.load(request_id)
  if version then return -1 - version end
  if not r then return redis.call('GET', names[k]) end
  if differs(k, r.environment, r.digest) then return 5 end
  hand_over(request_id, r, client, phase_text)
  return 2
end

-- Queues a new request, which waits in its list if there is room.
local function enqueue(k)
  local ring, tenant = kinds[kind_of[k]].ring, tenants[k]
  local numbers = ring.numbers[tenant]
  if not numbers then
    numbers = {}
    ring.numbers[tenant], ring.tenants[#ring.tenants + 1] = numbers, tenant
  end
  numbers[#numbers + 1] = k
end

-- Takes in a new request that may equal others, or that some workers may be warm for.
local function take_in(k, run_id, phase_text)
  local kind, request_id, digest = kinds[kind_of[k]], request_ids[k], digests[k]
  local environment, lease = kind.environment, phase.read_lease(phase_text)
  if lease and (lease.environment ~= environment.name or differs(k, lease.environment, lease.digest)) then
    return 5
  end
  if lease then
    -- It was withdrawn, and its reply has gone. It runs on for others, and now for this client as well.
    if kind.detached then lease.detached = '1' end
    phase.set_client(request_id, lease, client)
    environment.joined = environment.joined + 1
    keep(k)
    return 2
  end
  local reply = digest ~= '' and environment.fingerprint
    and redis.call('GET', tag .. ':verdict:' .. environment.fingerprint .. ':' .. digest)
  if reply then
    reply = submit_time.set(reply, now)
    redis.call('SET', names[k], reply, 'PX', remember_ms)
    remembered = remembered + 1
    return reply
  end
  if kind.affinity ~= '' then environment.affinity = true end
  if not single_flight.join(request_id, run_id, digest, now) then return enqueue(k) end
  environment.joined = environment.joined + 1
  keep(k)
end

-- Puts new requests at the end of a tenant's list, and refuses those that find no room. Returns whether the
-- list was empty before.
local function extend(ring, tenant, numbers)
  local name, waiting, length = 'wait:' .. ring.name .. ':' .. tenant, {}, 0
  for i, k in ipairs(numbers) do waiting[i] = request_ids[k] end
  for i = 1, #waiting, 4000 do
    length = redis.call('RPUSH', tag .. ':' .. name, unpack(waiting, i, math.min(i + 3999, #waiting)))
  end
  local taken, was_empty = #waiting, length == #waiting
  if length > max_waiting then
    -- Withdrawn requests take no room.
    local withdrawn = tonumber(redis.call('HGET', tag .. ':withdrawn', name) or 0)
    taken = math.min(taken, math.max(0, taken - (length - withdrawn - max_waiting)))
    if taken < #waiting then redis.call('RPOP', tag .. ':' .. name, #waiting - taken) end
  end
  for i, k in ipairs(numbers) do
    if i > taken then out[k] = 3 else keep(k) end
  end
  local environment = ring.environment
  environment.added = environment.added + taken
  if not paused or not (environment.paused or wait_list.is_paused('t', tenant)) then
    environment.may_start = environment.may_start + taken
  end
  return was_empty and taken > 0
end

-- Read at once what the server knows of them. A request id is hardly ever there already.
local fields, asked = {}, {}
for k, digest in ipairs(digests) do
  if digest ~= '' then
    local n = #fields + 1
    fields[n], fields[n + 1] = single_flight.key(kinds[kind_of[k]].environment.name, digest), request_ids[k]
    asked[k] = n
  end
end
local any = bulk.existing(names)
local phases = bulk.call('HMGET', tag .. ':phase', fields)

-- `first`: where in the batch a request id stands first; `twice`: the first place of each one that comes
-- again.
local first, twice = {}, {}
for k, request_id in ipairs(request_ids) do
  local kind, n = kinds[kind_of[k]], asked[k]
  if first[request_id] then
    twice[k] = first[request_id]
  else
    first[request_id] = k
    if any > 0 and redis.call('EXISTS', names[k]) == 1 then
      out[k] = again(k)
    elseif not kind.environment.known then
      out[k] = 4
    elseif n or kind.affinity ~= '' then
      out[k] = take_in(k, n and phases[n], n and phases[n + 1])
    else
      enqueue(k)
    end
  end
end
for _, ring in ipairs(rings) do
  local opened = {}
  for _, tenant in ipairs(ring.tenants) do
    if extend(ring, tenant, ring.numbers[tenant]) then
      if paused then wait_list.open('RPUSH', ring.name, tenant)
      else opened[#opened + 1] = tenant end
    end
  end
  bulk.call('RPUSH', tag .. ':ring:' .. ring.name, opened)
end
bulk.call('MSET', nil, records)
for k, other in pairs(twice) do out[k] = again(k) or out[other] end
-- Remove the uploads of requests that were not taken in.
bulk.call('UNLINK', nil, uploads)

counters.add('remembered', remembered)
for name, environment in pairs(environments) do
  counters.submitted(name, environment.added, environment.joined)
  if environment.affinity then counters.note_affinity(name) end
  if environment.may_start > 0 then notify(name, environment.may_start) end
end
counters.write()
local answers = {}
for k, became in pairs(out) do
  local n = #answers
  answers[n + 1], answers[n + 2] = k, became
end
return answers
