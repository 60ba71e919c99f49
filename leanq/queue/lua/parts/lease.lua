-- parts: clock bulk phase counters single_flight waiting warmth shares
-- arguments: worker token
-- each call: lease.shares, lease.phases, lease.timeouts = nil, {}, {}
-- each call: lease.request_ids, lease.records, lease.isolated, lease.taken_in = {}, {}, {}, {}
-- The leases that a claim gives out, written together at its end. The worker gets `request_ids` and
-- `records`, which are whole since a part would be a second copy. It also gets `isolated`, the numbers of
-- the requests that run alone. `shares` is set if tenants have weights.
local lease = {}

-- Returns whether a waiting request has joined the run of an identical one, and so needs none of its own.
function lease.joins(request_id, r, isolated)
  if r.digest == '' then return false end
  local key = single_flight.key(r.environment, r.digest)
  local run_id = single_flight.run_of(key)
  if not single_flight.join(request_id, run_id, r.digest, r.submitted, isolated) then return false end
  waiting.taken[request_id] = true
  counters.add('waiting:' .. r.environment, -1)
  return true
end

-- Requests with the same record share one lease text, unless each is charged.
function lease.text(r, isolated)
  if r.lease and not lease.shares then return r.lease end
  local alone = isolated and r.digest ~= '' and '1' or ''
  local charge, detached = lease.shares and lease.shares.charge(r) or '', r.detached and '1' or ''
  r.lease = phase.leased(
    token, worker, r.client, r.environment, alone, r.digest, r.affinity, r.tenant, charge, detached)
  return r.lease
end

-- Leases a waiting request to this worker; returns false if it joined a run instead.
function lease.take(request_id, r, text, isolated)
  if lease.joins(request_id, r, isolated) then return false end
  local environment, phases, leased = r.environment, lease.phases, lease.text(r, isolated)
  if r.digest ~= '' then
    -- Others may still join it in this call.
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
