-- The phase of a request in flight: its value in :phase. The first letter says which fields follow, each
-- ended by a zero byte. A request that simply waits in its list has no phase.
local phase = {
  LEASED = 'l',       -- token, worker, client, environment, '1' for an isolated attempt of what may be
                      -- shared, digest, affinity, tenant, what the tenant was charged (see shares.lua),
                      -- '1' for a detached request
  JOINED = 'j',       -- to the run of an identical request: that request, its worker
  PASSED_OVER = 'p',  -- waits, and a warmer one went before it: when that first happened (ms)
  QUARANTINED = 'i',  -- waits for an isolated attempt
}

function phase.kind(text) return text and string.sub(text, 1, 1) end

function phase.leased(token, worker, client, environment, isolated, digest, affinity, tenant, charge, detached)
  return phase.LEASED .. token .. '\0' .. worker .. '\0' .. client .. '\0' .. environment .. '\0'
    .. isolated .. '\0' .. digest .. '\0' .. affinity .. '\0' .. tenant .. '\0' .. charge .. '\0'
    .. detached .. '\0'
end

function phase.read_lease(text)
  if phase.kind(text) ~= phase.LEASED then return nil end
  local token, worker, client, environment, isolated, digest, affinity, tenant, charge, detached =
    struct.unpack('ssssssssss', text, 2)
  return {token = token, worker = worker, client = client, environment = environment,
    isolated = isolated, digest = digest, affinity = affinity, tenant = tenant, charge = charge,
    detached = detached}
end

-- Writes a lease again, with another client to hear of its end.
function phase.set_client(request_id, lease, client)
  redis.call('HSET', tag .. ':phase', request_id, phase.leased(lease.token, lease.worker, client,
    lease.environment, lease.isolated, lease.digest, lease.affinity, lease.tenant, lease.charge, lease.detached))
end

function phase.joined(run_id, worker) return phase.JOINED .. run_id .. '\0' .. worker .. '\0' end

-- Returns the run that a request joined, and its worker; nil if it joined none.
function phase.read_joined(text)
  if phase.kind(text) ~= phase.JOINED then return nil end
  return struct.unpack('ss', text, 2)
end

function phase.passed_over(ms) return phase.PASSED_OVER .. string.format('%.0f', ms) .. '\0' end

-- Returns when a warmer request first went before this one (ms); nil if none did.
function phase.read_passed_over(text)
  return phase.kind(text) == phase.PASSED_OVER and tonumber((struct.unpack('s', text, 2))) or nil
end
