#!lua
-- parts: clock bulk record phase counters wait_list wakeup single_flight history hand_over
-- submit: takes requests in, or says why not. Idempotent by request id. Without allow-oom: a full memory
-- refuses the whole call and so becomes back-pressure. `max_waiting`: per environment, priority and
-- tenant. `remember_ms`: time-to-live of replies where remembered verdicts count, else 0. `kinds`: what
-- requests have in common (environment, priority, deadline_ms from now or 0, run_ms, affinity: up to two
-- names, the strongest first; detached); a request names its kind by number. The body of a detached
-- request was uploaded before this call, which alone has the name `upload`; its row has the body's size.
-- Returns per request: 1 queued or joined to a run, 2 in flight already (the client now hears of its
-- end), 3 the tenant's list is full, 4 no worker ever offered this environment, or the reply itself.
-- Returns 0 where an upload is not there: the server had no memory for it, and nothing has changed.
local uploads = {}
for _, item in ipairs(upload ~= '' and requests or {}) do
  if kinds[item.kind].detached then
    item.upload = tag .. ':upload:' .. upload .. ':' .. item.request_id
    uploads[#uploads + 1] = item.upload
  end
end
if bulk.existing(uploads) < #uploads then
  bulk.call('UNLINK', nil, uploads)
  return 0
end
note_minute()
local paused = redis.call('EXISTS', tag .. ':paused') == 1
local out, records, remembered = {}, {}, 0

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
    rings[ring_name] = {name = ring_name, environment = environment, tenants = {}, requests = {}}
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
local function keep(item)
  if item.upload then
    local body = record.body_key(item.request_id)
    redis.call('RENAME', item.upload, body)
    redis.call('PERSIST', body)
  end
  local n = #records
  records[n + 1] = item.name
  records[n + 2] = kinds[item.kind].head .. item.tenant .. '\0' .. item.digest .. '\0' .. item.body
end

-- One that is there already: in flight, whose client is this one from now on, or ended.
local function again(item)
  local phase_text, r = redis.call('HGET', tag .. ':phase', item.request_id), record.load(item.request_id)
  if not r then return redis.call('GET', item.name) end
  hand_over(item.request_id, r, client, phase_text)
  return 2
end

-- One that is new to the server, and simply waits in its list, where there is room.
local function enqueue(item)
  local ring = kinds[item.kind].ring
  local requests = ring.requests[item.tenant]
  if not requests then
    requests = {}
    ring.requests[item.tenant], ring.tenants[#ring.tenants + 1] = requests, item.tenant
  end
  requests[#requests + 1] = item
  return 1
end

-- One that is new to the server, and may be like others, or one that some workers are warm for.
local function take_in(item, run_id, phase_text)
  local kind, digest = kinds[item.kind], item.digest
  local environment, lease = kind.environment, phase.read_lease(phase_text)
  if lease then
    -- It was withdrawn, its reply has gone, and it runs on for others: now for this client as well.
    keep(item)
    if kind.detached then lease.detached = '1' end
    phase.set_client(item.request_id, lease, client)
    return 2
  end
  local reply = digest ~= '' and environment.fingerprint
    and redis.call('GET', tag .. ':verdict:' .. environment.fingerprint .. ':' .. digest)
  if reply then
    redis.call('SET', item.name, reply, 'PX', remember_ms)
    remembered = remembered + 1
    return reply
  end
  if kind.affinity ~= '' then environment.affinity = true end
  if not single_flight.join(item.request_id, run_id, digest, now) then return enqueue(item) end
  environment.joined = environment.joined + 1
  keep(item)
  return 1
end

-- Puts new requests at the end of a tenant's list; those that find no room are refused. Whether the
-- list was empty before.
local function extend(ring, tenant, requests)
  local name, request_ids, length = 'wait:' .. ring.name .. ':' .. tenant, {}, 0
  for i, item in ipairs(requests) do request_ids[i] = item.request_id end
  for i = 1, #requests, 4000 do
    length = redis.call('RPUSH', tag .. ':' .. name,
      unpack(request_ids, i, math.min(i + 3999, #requests)))
  end
  local taken, was_empty = #requests, length == #requests
  if length > max_waiting then
    -- What was withdrawn takes no room.
    local withdrawn = tonumber(redis.call('HGET', tag .. ':withdrawn', name) or 0)
    taken = math.min(taken, math.max(0, taken - (length - withdrawn - max_waiting)))
    if taken < #requests then redis.call('RPOP', tag .. ':' .. name, #requests - taken) end
  end
  for i, item in ipairs(requests) do
    if i <= taken then keep(item) else out[item.number] = 3 end
  end
  ring.environment.added = ring.environment.added + taken
  return was_empty and taken > 0
end

-- What the server knows of them, all at once. Hardly ever is a request id there already.
local names, fields, asked = {}, {}, {}
for k, item in ipairs(requests) do
  item.number, item.name = k, tag .. ':req:' .. item.request_id
  names[k] = item.name
  if item.digest ~= '' then
    local n = #fields + 1
    fields[n], fields[n + 1] = single_flight.key(kinds[item.kind].environment.name, item.digest), item.request_id
    asked[k] = n
  end
end
local any = bulk.existing(names)
local phases = bulk.call('HMGET', tag .. ':phase', fields)

-- By request id where in the batch it stands first, and where it stands again.
local first, twice = {}, {}
for k, item in ipairs(requests) do
  local kind, n = kinds[item.kind], asked[k]
  if first[item.request_id] then
    twice[k] = first[item.request_id]
  else
    first[item.request_id] = k
    if any > 0 and redis.call('EXISTS', item.name) == 1 then
      out[k] = again(item)
    elseif not kind.environment.known then
      out[k] = 4
    elseif n or kind.affinity ~= '' then
      out[k] = take_in(item, n and phases[n], n and phases[n + 1])
    else
      out[k] = enqueue(item)
    end
  end
end
for _, ring in ipairs(rings) do
  local opened = {}
  for _, tenant in ipairs(ring.tenants) do
    if extend(ring, tenant, ring.requests[tenant]) then
      if paused then wait_list.open('RPUSH', ring.name, tenant)
      else opened[#opened + 1] = tenant end
    end
  end
  bulk.call('RPUSH', tag .. ':ring:' .. ring.name, opened)
end
for k, other in pairs(twice) do out[k] = out[other] == 1 and 2 or out[other] end
bulk.call('MSET', nil, records)
-- Those of requests that were not taken in.
bulk.call('UNLINK', nil, uploads)

counters.add('remembered', remembered)
for name, environment in pairs(environments) do
  counters.add('waiting:' .. name, environment.added)
  counters.add('s:' .. name, environment.added + environment.joined)
  counters.add('submitted', environment.added + environment.joined)
  if environment.affinity then redis.call('HSET', tag .. ':stats', 'affinity:' .. name, 1) end
  if environment.added > 0 and not environment.paused then notify(name, environment.added) end
end
counters.write()
return out
