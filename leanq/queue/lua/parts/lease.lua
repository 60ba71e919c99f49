-- parts: clock bulk phase counters single_flight waiting warmth shares
-- arguments: worker token
-- each call: lease.shares, lease.phases, lease.timeouts = nil, {}, {}
-- each call: lease.request_ids, lease.records, lease.isolated, lease.taken_in = {}, {}, {}, {}
-- The leases that a claim gives out, written together at its end. `request_ids` and `records` (whole, since a
-- part would be a second copy) go to the worker, and `isolated`, the numbers of those among them that run
-- alone. `shares`: where tenants have weights.
local lease = {}

-- Returns whether a request that waits needs no run of its own, since an identical one runs.
function lease.joins(request_id, r, isolated)
  if r.digest == '' then return false end
  local key = single_flight.key(r.environment, r.digest)
  local run_id = single_flight.run_of(key)
  if not single_flight.join(request_id, run_id, r.digest, r.submitted, isolated) then return false end
  waiting.taken[request_id] = true
  counters.add('waiting:' .. r.environment, -1)
  return true
end

-- A record that requests share has one lease for them, but where each is charged.
function lease.text(r, isolated)
  if r.lease and not lease.shares then return r.lease end
  local alone = isolated and r.digest ~= '' and '1' or ''
  local charge, detached = lease.shares and lease.shares.charge(r) or '', r.detached and '1' or ''
  r.lease = phase.leased(
    token, worker, r.client, r.environment, alone, r.digest, r.affinity, r.tenant, charge, detached)
  return r.lease
end

-- Returns whether the request, which waits, is now this worker's.
function lease.take(request_id, r, text, isolated)
  if lease.joins(request_id, r, isolated) then return false end
  local environment, phases, leased = r.environment, lease.phases, lease.text(r, isolated)
  if r.digest ~= '' then
    -- Others may join it still in this call.
    local key = single_flight.key(environment, r.digest)
    single_flight.leases[request_id], single_flight.runs[key] = leased, request_id
    local n = #phases
    phases[n + 1], phases[n + 2] = key, request_id
  end
  if r.affinity ~= '' then counters.found_warm(warmth.rank(r) < 3) end
  local n, k = #phases, #lease.request_ids + 1
  phases[n + 1], phases[n + 2] = request_id, leased
  lease.timeouts[2 * k - 1], lease.timeouts[2 * k] = now + r.run_ms, request_id
  lease.request_ids[k], lease.records[k] = request_id, text
  if isolated then lease.isolated[#lease.isolated + 1] = k end
  waiting.taken[request_id] = true
  lease.taken_in[environment] = (lease.taken_in[environment] or 0) + 1
  return true
end

function lease.write()
  if #lease.request_ids == 0 then return end
  bulk.call('HSET', tag .. ':phase', lease.phases)
  bulk.call('ZADD', tag .. ':processing:' .. worker, lease.timeouts)
  for environment, n in pairs(lease.taken_in) do counters.claimed(environment, n) end
end
