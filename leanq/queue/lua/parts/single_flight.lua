-- parts: phase bulk
-- Single-flight: of identical requests (one environment, one digest) one is leased, the run, and others
-- join it. :runs names by ENVIRONMENT:DIGEST the run that takes more, :joined:RUN has its joined requests
-- by age. A joined request counts the attempt and shares the run's end; deadline and client are its own.
-- A run whose client withdrew it goes on for them: it has its reply, and no client ('').
-- `leases`: of this call, still to be written, by request id. `runs`: what :runs said, or will say.
local single_flight = {leases = {}, runs = {}}

-- So many requests join one run, since they all end in one call. The next of their kind runs anew.
local MAX_JOINED = 1000

function single_flight.key(environment, digest) return environment .. ':' .. digest end

function single_flight.lease_of(request_id)
  return phase.read_lease(
    single_flight.leases[request_id] or redis.call('HGET', tag .. ':phase', request_id))
end

-- Asks for the runs of all these requests at once.
function single_flight.prefetch(records)
  local keys = {}
  for _, r in ipairs(records) do
    local key = r.digest ~= '' and single_flight.key(r.environment, r.digest)
    if key and single_flight.runs[key] == nil then keys[#keys + 1] = key end
  end
  for i, run_id in ipairs(bulk.call('HMGET', tag .. ':runs', keys)) do
    single_flight.runs[keys[i]] = run_id
  end
end

-- The id of a request whose record says what a run is: one that was withdrawn has its reply and no
-- record, but what joined it asked for the same.
function single_flight.with_record(run_id, lease)
  return lease.client ~= '' and run_id
    or redis.call('ZRANGE', tag .. ':joined:' .. run_id, 0, 0)[1] or run_id
end

-- Whether the request has joined the run from now on. `isolated`: it may take down its worker, and so
-- joins only what runs alone: what others run beside proves nothing against it.
function single_flight.join(request_id, run_id, digest, submitted, isolated)
  local lease = run_id and single_flight.lease_of(run_id)
  -- A server that lost keys may have left what is no such run.
  if not lease or lease.digest ~= digest or isolated and lease.isolated == '' then return false end
  local joined = tag .. ':joined:' .. run_id
  if redis.call('ZCARD', joined) >= MAX_JOINED then return false end
  redis.call('ZADD', joined, submitted, request_id)
  redis.call('HSET', tag .. ':phase', request_id, phase.joined(run_id, lease.worker))
  return true
end

-- Nothing more joins this run.
function single_flight.close(run_id, lease)
  local key = single_flight.key(lease.environment, lease.digest)
  if redis.call('HGET', tag .. ':runs', key) == run_id then redis.call('HDEL', tag .. ':runs', key) end
end
