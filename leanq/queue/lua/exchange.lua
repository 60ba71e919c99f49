#!lua flags=allow-oom
-- parts: clock record phase warmth wait_list single_flight deadline publish counters after_claim remember
-- parts: lasting left
-- exchange: does what claim does for the call that workers make most. It settles one result and claims one
-- request in one environment. It makes claim's commands in a straight line, since lists of arguments and
-- tables cost the server as much again. `settled_token` is the token of the result's lease, `token` that of
-- the new one.
-- Answers request_id, record: the claimed request, if there was one; held and now_ms as claim.
-- In an unusual case it does nothing, and claim has to be called. It returns 0 if the case may last:
-- pauses, weights, quarantined requests, or requests that other workers are warm for. It returns nil in all
-- other cases.
local call, phases = redis.call, tag .. ':phase'
local processing = tag .. ':processing:' .. worker

-- The lease, and whatever is rare.
if reason == 'kernels_disagree' then return false end
local lease = call('HGET', phases, request_id)
if phase.kind(lease) ~= phase.LEASED then return false end
local lease_token, _, client, lease_environment, _, digest, affinity, tenant, charge, detached =
  struct.unpack('ssssssssss', lease, 2)
if lease_token ~= settled_token or lease_environment ~= environment or charge ~= '' or client == ''
  or string.find(client, ' ', 1, true) then return false end
local upload = uploaded and tag .. ':upload:' .. settled_token .. ':' .. request_id
if uploaded then reply = publish.uploaded(upload) end
if not reply then return false end
-- EXISTS counts repeated keys, so the sum tells the cases apart.
local paused, weights = tag .. ':paused', lasting .. ':weights'
local joined, quarantined = tag .. ':joined:' .. request_id, tag .. ':quarantined:' .. environment
local own_left = left.key(environment, record.VERSION)
local unusual =
  call('EXISTS', joined, own_left, paused, paused, weights, weights, quarantined, quarantined)
if unusual > 0 then return unusual > 1 and 0 end

local run_key = digest ~= '' and single_flight.key(environment, digest)
counters.add('settled', 1)
counters.ended(environment, outcome, reason, 1)
counters.came(way, 1)
counters.used(environment, tenant, cpu_ms)
counters.read({'claimed', 'turn:' .. environment, 'waiting:' .. environment, 'affinity:' .. environment,
  'warm_hits'})
local has_affinity = counters.has_affinity(environment)
local held = call('ZCARD', processing)

-- The next request. A request taken out of its list is put back if claim has to look at it.
local filled = wait_list.filled(environment)
local run_id
local ring, list, next_id, text, r, next_key
if filled > 0 then
  -- If several priorities have work, every eighth request goes round them.
  if filled ~= 1 and filled ~= 2 and filled ~= 4 and counters.value('turn:' .. environment) % 8 == 7 then
    return false
  end
  local priority = filled % 2 == 1 and 0 or filled % 4 >= 2 and 1 or 2
  ring = tag .. ':ring:' .. environment .. ':' .. priority
  local next_tenant = call('LMOVE', ring, ring, 'LEFT', 'RIGHT')
  list = tag .. ':wait:' .. environment .. ':' .. priority .. ':' .. next_tenant
  next_id = call('LPOP', list)
  text = next_id and call('GET', tag .. ':req:' .. next_id)
  r = record.read(text)
  -- A request that was withdrawn here may have come again and wait elsewhere.
  local simple = r and not deadline.is_past(r)
    and r.tenant == next_tenant and r.priority == priority and r.environment == environment
  if simple and has_affinity then
    -- Other requests may go first, unless the worker is warm for this one.
    simple = r.affinity ~= '' and (warm and r.affinity == affinity or warmth.is_warm(environment, r.affinity))
  end
  if simple then
    next_key = r.digest ~= '' and single_flight.key(environment, r.digest)
    local found = call('HMGET', phases, next_id, next_key or next_id, run_key or next_id)
    simple, run_id = not found[1] and not found[2], found[3]
  end
  if not simple then
    if next_id then call('LPUSH', list, next_id) end
    call('LMOVE', ring, ring, 'RIGHT', 'LEFT')
    return has_affinity and 0
  end
elseif run_key then
  run_id = call('HGET', phases, run_key)
end

-- Lease the next request before all else. A key of a wrong type ends the script where it stands, and by
-- then the request must be in its list or leased.
local more = false
if r then
  local next_detached = r.detached and '1' or ''
  local leased =
    phase.leased(token, worker, r.client, environment, '', r.digest, r.affinity, r.tenant, '', next_detached)
  if next_key then call('HSET', phases, next_key, next_id, next_id, leased)
  else call('HSET', phases, next_id, leased) end
  held = held + call('ZADD', processing, now + r.run_ms, next_id)
  more = call('EXISTS', list) == 1
  if not more then call('LREM', ring, -1, r.tenant) end
  counters.claimed(environment, 1)
  counters.picked(environment, 1)
  if r.affinity ~= '' then counters.found_warm(true) end
end

-- Settle the result. Tell its client last: a call that failed there comes again, and finds it settled.
publish.write(tag .. ':req:' .. request_id, reply, reply_ttl_ms)
held = held - call('ZREM', processing, request_id)
if run_id == request_id then call('HDEL', phases, request_id, run_key) else call('HDEL', phases, request_id) end
if detached ~= '' then call('UNLINK', record.body_key(request_id)) end
counters.write()
remember(fingerprint, digest, reply)
after_claim.extend_lease(held)
if warm and affinity ~= '' then warmth.note(environment, affinity) end
if r then after_claim.wake_another(environment, more) end
publish.inboxes[client] = {request_id, publish.told(reply)}
publish.send(client)
return answer({request_id = r and next_id or false, record = r and text or false, held = held, now_ms = now})
