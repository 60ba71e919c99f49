#!lua
-- parts: clock bulk record phase counters wait_list wakeup single_flight history hand_over
-- submit: takes requests in, or says why not. Idempotent by request id. Without allow-oom: a full memory
-- refuses the whole call and so becomes back-pressure. `max_waiting`: per environment, priority and
-- tenant. `remember_ms`: time-to-live of replies where remembered verdicts count, else 0. `kinds`: what
-- requests have in common (environment, priority, deadline_ms from now or 0, run_ms, affinity: up to two
-- names, the strongest first; detached); a request names its kind by number. The body of a detached
-- request was uploaded before this call, which alone has the name `upload`; its row has the body's size.
-- Returns, of each request that is not simply queued or joined to a run, its number and what became of it:
-- 2 in flight already (the client now hears of its end), 3 the tenant's list is full, 4 no worker ever
-- offered this environment, 5 in flight with other content, or the reply itself.
-- Returns 0 where an upload is not there: the server had no memory for it, and nothing has changed.
local request_ids, kind_of = requests.request_id, requests.kind
local tenants, digests, bodies = requests.tenant, requests.digest, requests.body
-- Below, a request is its number in the call. `upload_of`: the names of bodies that were uploaded.
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
-- By number, what became of those that are not queued.
local names, out, records, kept, remembered = {}, {}, {}, 0, 0
local prefix = tag .. ':req:'
for k, request_id in ipairs(request_ids) do names[k] = prefix .. request_id end

-- What this call knows of an environment.
local environments = {}
local function environment_of(name)
  local environment = environments[name]
  if not environment then
    environment = {name = name, added = 0, joined = 0, affinity = false,
      known = redis.call('HEXISTS', tag .. ':environments', name) == 1
        or redis.call('HLEN', tag .. ':environments') == 0,
      fingerprint = remember_ms > 0 and redis.call('HGET', tag .. ':fingerprints', name),
      paused = paused and wait_list.is_paused('e', name)}
    environments[name] = environment
  end
  return environment
end

-- Where requests of each kind wait: by environment and priority, the tenants with their new requests.
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
  -- All but tenant and digest, and the zero bytes that end these.
  kind.head = string.sub(record.head({attempts = 0, priority = kind.priority, submitted = now,
    deadline = kind.deadline_ms > 0 and now + kind.deadline_ms or 0, run_ms = kind.run_ms,
    environment = kind.environment, client = client, affinity = kind.affinity,
    second_affinity = kind.second_affinity, tenant = '', digest = '', detached = kind.detached}), 1, -3)
  kind.environment = environment
end

-- The record of a request, which is written with the others. Its body, which may go by now, must not.
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

-- Returns whether a request asks for something else than one of the same name. A request without a digest, as an
-- echo, may be any in its environment.
local function differs(k, environment, digest)
  return kinds[kind_of[k]].environment.name ~= environment
    or (digests[k] ~= '' and digest ~= '' and digests[k] ~= digest)
end

-- One that is there already: in flight, whose client is this one from now on, or ended.
local function again(k)
  local request_id = request_ids[k]
  local phase_text, r = redis.call('HGET', tag .. ':phase', request_id), record.load(request_id)
  if not r then return redis.call('GET', names[k]) end
  if differs(k, r.environment, r.digest) then return 5 end
  hand_over(request_id, r, client, phase_text)
  return 2
end

-- One that is new to the server, and simply waits in its list, where there is room.
local function enqueue(k)
  local ring, tenant = kinds[kind_of[k]].ring, tenants[k]
  local numbers = ring.numbers[tenant]
  if not numbers then
    numbers = {}
    ring.numbers[tenant], ring.tenants[#ring.tenants + 1] = numbers, tenant
  end
  numbers[#numbers + 1] = k
end

-- One that is new to the server, and may be like others, or one that some workers are warm for.
local function take_in(k, run_id, phase_text)
  local kind, request_id, digest = kinds[kind_of[k]], request_ids[k], digests[k]
  local environment, lease = kind.environment, phase.read_lease(phase_text)
  if lease and differs(k, lease.environment, lease.digest) then return 5 end
  if lease then
    -- It was withdrawn, its reply has gone, and it runs on for others: now for this client as well.
    keep(k)
    if kind.detached then lease.detached = '1' end
    phase.set_client(request_id, lease, client)
    return 2
  end
  local reply = digest ~= '' and environment.fingerprint
    and redis.call('GET', tag .. ':verdict:' .. environment.fingerprint .. ':' .. digest)
  if reply then
    redis.call('SET', names[k], reply, 'PX', remember_ms)
    remembered = remembered + 1
    return reply
  end
  if kind.affinity ~= '' then environment.affinity = true end
  if not single_flight.join(request_id, run_id, digest, now) then return enqueue(k) end
  environment.joined = environment.joined + 1
  keep(k)
end

-- Puts new requests at the end of a tenant's list; those that find no room are refused. Whether the
-- list was empty before.
local function extend(ring, tenant, numbers)
  local name, waiting, length = 'wait:' .. ring.name .. ':' .. tenant, {}, 0
  for i, k in ipairs(numbers) do waiting[i] = request_ids[k] end
  for i = 1, #waiting, 4000 do
    length = redis.call('RPUSH', tag .. ':' .. name, unpack(waiting, i, math.min(i + 3999, #waiting)))
  end
  local taken, was_empty = #waiting, length == #waiting
  if length > max_waiting then
    -- What was withdrawn takes no room.
    local withdrawn = tonumber(redis.call('HGET', tag .. ':withdrawn', name) or 0)
    taken = math.min(taken, math.max(0, taken - (length - withdrawn - max_waiting)))
    if taken < #waiting then redis.call('RPOP', tag .. ':' .. name, #waiting - taken) end
  end
  for i, k in ipairs(numbers) do
    if i <= taken then keep(k) else out[k] = 3 end
  end
  ring.environment.added = ring.environment.added + taken
  return was_empty and taken > 0
end

-- What the server knows of them, all at once. Hardly ever is a request id there already.
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

-- By request id where in the batch it stands first, and where it stands again.
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
-- Those of requests that were not taken in.
bulk.call('UNLINK', nil, uploads)

counters.add('remembered', remembered)
for name, environment in pairs(environments) do
  counters.submitted(name, environment.added, environment.joined)
  if environment.affinity then counters.note_affinity(name) end
  if environment.added > 0 and not environment.paused then notify(name, environment.added) end
end
counters.write()
local answers = {}
for k, became in pairs(out) do
  local n = #answers
  answers[n + 1], answers[n + 2] = k, became
end
return answers
