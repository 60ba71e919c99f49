-- parts: clock record phase wait_list wakeup publish counters dead_letters single_flight
-- parts: is_isolated left
-- arguments: max_attempts
-- each call: requeue.disbanded = 0
-- Requests whose lease ended without a reply. `disbanded`: how many joined requests this call has sent
-- back.
local requeue = {}

-- The most bytes of all lost attempts of one request, since the head of a record is read as a whole.
local MAX_LOST = 360

-- Returns the lost attempts of a request with one more, the oldest left out if they are too long. Each has its
-- worker, when it was claimed (ms, 0: not known), when it was lost, and why. leanq/fleet/timeline.py reads them.
local function with_lost(request_id, r, lease, worker, why)
  local ends_ms = lease and redis.call('ZSCORE', tag .. ':processing:' .. lease.worker, request_id)
  local claimed = ends_ms and ends_ms - r.run_ms or 0
  local lost = r.lost .. string.format('%s %.0f %.0f %s;', string.sub(worker, -64), claimed, now, why)
  while #lost > MAX_LOST do lost = string.gsub(lost, '^[^;]*;', '') end
  return lost
end

-- Puts one leased or joined request back to the front, or makes it a dead letter. A lease must still be in its
-- worker's processing list, which knows when it began.
-- `how`: requeue, retry (the attempt counts) or defer (to the end of its waiting list). `why`: the word for it
-- among the lost attempts. `environment`: the run's, for what cannot be read.
-- Returns 'queued', 'poisoned' or 'lost'.
function requeue.one(request_id, how, why, environment)
  local phase_text, r, version = redis.call('HGET', tag .. ':phase', request_id), record.load(request_id)
  redis.call('HDEL', tag .. ':phase', request_id)
  if phase.read_joined(phase_text) then counters.add('joined', -1) end
  if version then
    left.put(environment, version, request_id, how)
    return 'queued'
  end
  if not r then
    -- Either it has its reply and ran only for requests that joined it, or the server deleted its record to
    -- make room. Its client sends a deleted one again.
    redis.call('UNLINK', record.body_key(request_id))
    return 'lost'
  end
  local attempts = r.attempts + (how == 'retry' and 1 or 0)
  local lease = phase.read_lease(phase_text)
  local _, run_worker = phase.read_joined(phase_text)
  local worker = lease and lease.worker or run_worker or ''
  local body = string.sub(redis.call('GET', tag .. ':req:' .. request_id), r.body)
  r.lost, r.attempts = with_lost(request_id, r, lease, worker, why), attempts
  redis.call('SET', tag .. ':req:' .. request_id, record.head(r) .. body)
  if attempts >= max_attempts then
    bury('dead', request_id, r, attempts, worker)
    publish.reply(request_id, r.client, publish.verdict(r, 'poisoned', 'too_many_deaths', attempts, 0))
    counters.ended(r.environment, 'poisoned', 'too_many_deaths', 1)
    return 'poisoned'
  end
  counters.add('waiting:' .. r.environment, 1)
  local push = how == 'defer' and 'RPUSH' or 'LPUSH'
  local held = wait_list.is_paused('e', r.environment)
  if is_isolated(attempts) then
    redis.call('HSET', tag .. ':phase', request_id, phase.QUARANTINED)
    redis.call(push, tag .. ':quarantined:' .. r.environment, request_id)
  else
    wait_list.put(push, request_id, r)
    held = held or wait_list.is_paused('t', r.tenant)
  end
  if not held then notify(r.environment, 1) end
  return 'queued'
end

-- Requeues a run and the requests that joined it; returns what became of the run, as above. Joined requests
-- may go back in any order, since they are the same.
function requeue.run(request_id, how, why)
  local lease = phase.read_lease(redis.call('HGET', tag .. ':phase', request_id))
  local environment = lease and lease.environment or ''
  local became = requeue.one(request_id, how, why, environment)
  if lease and lease.digest ~= '' then
    single_flight.close(request_id, lease)
    local joined = tag .. ':joined:' .. request_id
    for _, other in ipairs(redis.call('ZRANGE', joined, 0, -1)) do
      if phase.read_joined(redis.call('HGET', tag .. ':phase', other)) == request_id then
        requeue.one(other, how, why, environment)
      end
      requeue.disbanded = requeue.disbanded + 1
    end
    redis.call('UNLINK', joined)
  end
  return became
end

-- Returns whether this call has sent back as many joined requests as one call may.
function requeue.is_full() return requeue.disbanded >= 1000 end
