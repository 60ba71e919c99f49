-- parts: phase bulk counters
-- each call: single_flight.leases, single_flight.runs = {}, {}
-- Single-flight: identical requests have one environment and one digest. One of them is leased, the run,
-- and the others join it. In :phase, r:ENVIRONMENT:DIGEST names the run that others may join; :joined:RUN
-- has its joined requests by age. A joined request counts the attempt and shares the run's end, but keeps
-- its own deadline and client. A run whose client withdrew it goes on for them: it has its reply, and no
-- client ('').
-- `leases`: leases of this call that are not written yet, by request id. `runs`: the run of each key, as
-- :phase names it or will.
local single_flight = {}

-- The most requests that join one run, since they all end in one call. The next identical one runs anew.
local MAX_JOINED = 1000

-- Returns the field of :phase that names a run; no request id begins so.
function single_flight.key(environment, digest) return 'r:' .. environment .. ':' .. digest end

function single_flight.lease_of(request_id)
  return phase.read_lease(
    single_flight.leases[request_id] or redis.call('HGET', tag .. ':phase', request_id))
end

-- Reads the runs of all these requests in one command.
function single_flight.prefetch(records)
  local keys = {}
  for _, r in ipairs(records) do
    local key = r.digest ~= '' and single_flight.key(r.environment, r.digest)
    if key and single_flight.runs[key] == nil then keys[#keys + 1] = key end
  end
  for i, run_id in ipairs(bulk.call('HMGET', tag .. ':phase', keys)) do
    single_flight.runs[keys[i]] = run_id
  end
end

-- Returns the phase of a request, and reads the run of identical ones with it.
function single_flight.phase_of(request_id, r)
  local key = r and r.digest ~= '' and single_flight.key(r.environment, r.digest)
  if not key or single_flight.runs[key] ~= nil then
    return redis.call('HGET', tag .. ':phase', request_id)
  end
  local found = redis.call('HMGET', tag .. ':phase', request_id, key)
  single_flight.runs[key] = found[2]
  return found[1]
end

-- Returns the run that :phase names; false if it names none.
function single_flight.run_of(key)
  if single_flight.runs[key] == nil then
    single_flight.runs[key] = redis.call('HGET', tag .. ':phase', key)
  end
  return single_flight.runs[key]
end

-- Returns the id of a request that has the run's record. A withdrawn run has its reply and no record, but
-- the requests that joined it asked for the same.
function single_flight.with_record(run_id, lease)
  return lease.client ~= '' and run_id
    or redis.call('ZRANGE', tag .. ':joined:' .. run_id, 0, 0)[1] or run_id
end

-- Joins the request to the run; returns whether it has joined. `isolated`: it may take down its worker, so
-- it joins only a run that is alone. A run beside others would prove nothing about it.
function single_flight.join(request_id, run_id, digest, submitted, isolated)
  local lease = run_id and single_flight.lease_of(run_id)
  -- A server that lost keys may name a request that is no such run.
  if not lease or lease.digest ~= digest or isolated and lease.isolated == '' then return false end
  local joined = tag .. ':joined:' .. run_id
  if redis.call('ZCARD', joined) >= MAX_JOINED then return false end
  redis.call('ZADD', joined, submitted, request_id)
  counters.add('joined', 1)
  redis.call('HSET', tag .. ':phase', request_id, phase.joined(run_id, lease.worker))
  return true
end

function single_flight.close(run_id, lease)
  local key = single_flight.key(lease.environment, lease.digest)
  if redis.call('HGET', tag .. ':phase', key) == run_id then redis.call('HDEL', tag .. ':phase', key) end
end
