-- parts: clock bulk phase counters single_flight waiting warmth shares
-- arguments: worker token
-- each call: lease.shares, lease.jobs, lease.phases, lease.timeouts = nil, {}, {}, {}
-- each call: lease.texts, lease.taken_in = {}, {}
-- The leases that a claim gives out, written together at its end. `jobs`: per request its id, 1
-- where it is isolated, and its whole record, of which a part would be a second copy. `shares`:
-- where tenants have weights.
local lease = {}

-- Whether a request that waits needs no run of its own, since an identical one runs.
function lease.joins(r, isolated)
  if r.digest == '' then return false end
  local key = single_flight.key(r.environment, r.digest)
  local run_id = single_flight.run_of(key)
  if not single_flight.join(r.request_id, run_id, r.digest, r.submitted, isolated) then return false end
  waiting.taken[r.request_id] = true
  counters.add('waiting:' .. r.environment, -1)
  return true
end

-- Most requests of one call have the same lease but for their digests.
function lease.text(r, isolated)
  local charge, detached = lease.shares and lease.shares.charge(r) or '', r.detached and '1' or ''
  if r.digest ~= '' then
    local alone = isolated and '1' or ''
    return phase.leased(
      token, worker, r.client, r.environment, alone, r.digest, r.affinity, r.tenant, charge, detached)
  end
  local known = lease.texts[r.client]
  if not known then known = {}; lease.texts[r.client] = known end
  local key = r.environment .. ':' .. r.affinity .. ':' .. r.tenant .. ':' .. detached .. ':' .. charge
  if not known[key] then
    known[key] =
      phase.leased(token, worker, r.client, r.environment, '', '', r.affinity, r.tenant, charge, detached)
  end
  return known[key]
end

-- Whether the request, which waits, is now this worker's.
function lease.take(r, isolated)
  local request_id, environment, phases = r.request_id, r.environment, lease.phases
  if lease.joins(r, isolated) then return false end
  local text = lease.text(r, isolated)
  if r.digest ~= '' then
    -- Others may join it still in this call.
    local key = single_flight.key(environment, r.digest)
    single_flight.leases[request_id], single_flight.runs[key] = text, request_id
    local n = #phases
    phases[n + 1], phases[n + 2] = key, request_id
  end
  if r.affinity ~= '' then counters.add(warmth.rank(r) < 3 and 'warm_hits' or 'warm_misses', 1) end
  local n, m = #phases, #lease.timeouts
  phases[n + 1], phases[n + 2] = request_id, text
  lease.timeouts[m + 1], lease.timeouts[m + 2] = now + r.run_ms, request_id
  lease.jobs[#lease.jobs + 1] = {request_id, isolated and 1 or 0, r.text}
  waiting.taken[request_id] = true
  lease.taken_in[environment] = (lease.taken_in[environment] or 0) + 1
  return true
end

function lease.write()
  if #lease.jobs == 0 then return end
  bulk.call('HSET', tag .. ':phase', lease.phases)
  bulk.call('ZADD', tag .. ':processing:' .. worker, lease.timeouts)
  counters.add('claimed', #lease.jobs)
  for environment, n in pairs(lease.taken_in) do counters.add('waiting:' .. environment, -n) end
end
