-- Where a request in flight is: its value in :where, whose first letter says which fields follow, each
-- ended by a zero byte. Of a request that simply waits in its line there is none.
--   l  leased: token, worker, client, environment, '1' for an isolated attempt of what may be shared,
--      digest, affinity
--   j  joined to the run of an identical request: that request, its worker
--   r  reserved: to this worker
--   p  waits, and a warmer one went before it: when that first happened (ms)
--   i  waits for an isolated attempt
local place = {}

function place.lease(token, worker, client, environment, isolated, digest, affinity)
  return 'l' .. token .. '\0' .. worker .. '\0' .. client .. '\0' .. environment .. '\0'
    .. isolated .. '\0' .. digest .. '\0' .. affinity .. '\0'
end

function place.read_lease(text)
  if not text or string.byte(text) ~= 108 then return nil end
  local token, worker, client, environment, isolated, digest, affinity =
    struct.unpack('sssssss', text, 2)
  return {token = token, worker = worker, client = client, environment = environment,
    isolated = isolated, digest = digest, affinity = affinity}
end

-- Writes a lease again, with another client to hear of its end.
function place.lease_to(request_id, lease, client)
  redis.call('HSET', tag .. ':where', request_id, place.lease(lease.token, lease.worker, client,
    lease.environment, lease.isolated, lease.digest, lease.affinity))
end

function place.joined(run_id, worker) return 'j' .. run_id .. '\0' .. worker .. '\0' end

-- The run that a request joined, and its worker; nil where it joined none.
function place.read_joined(text)
  if not text or string.byte(text) ~= 106 then return nil end
  return struct.unpack('ss', text, 2)
end

function place.reserved(worker) return 'r' .. worker .. '\0' end

function place.passed(ms) return 'p' .. string.format('%.0f', ms) .. '\0' end

-- When a warmer request first went before this one (ms); nil where none did.
function place.read_passed(text)
  return text and string.byte(text) == 112 and tonumber((struct.unpack('s', text, 2))) or nil
end
