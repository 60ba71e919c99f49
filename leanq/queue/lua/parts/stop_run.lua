-- parts: phase record single_flight counters
-- Ends runs that are no longer wanted.
local stop_run = {}

-- Takes a leased request away from its worker, and tells the worker to stop it.
function stop_run.stop(request_id, lease)
  redis.call('HDEL', tag .. ':phase', request_id)
  redis.call('ZREM', tag .. ':processing:' .. lease.worker, request_id)
  redis.call('RPUSH', tag .. ':stop:' .. lease.worker, request_id)
  if lease.digest ~= '' then single_flight.close(request_id, lease) end
end

-- Takes a joined request out of its run. The last one stops a run that its own client withdrew.
function stop_run.leave(request_id, run_id)
  local joined = tag .. ':joined:' .. run_id
  redis.call('ZREM', joined, request_id)
  counters.add('joined', -1)
  local lease = single_flight.lease_of(run_id)
  if lease and lease.client == '' and redis.call('ZCARD', joined) == 0 then
    stop_run.stop(run_id, lease)
    if lease.detached ~= '' then redis.call('UNLINK', record.body_key(run_id)) end
  end
end
