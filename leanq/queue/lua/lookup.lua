#!lua flags=allow-oom
-- parts: record phase wait_list publish counters single_flight stop_run withdraw deadline requeue hand_over
-- lookup: says what became of requests. Its client hears of their ends from now on.
-- Returns per request id: the reply, or 1 queued, 2 leased or joined to a run, 0 unknown. Below 0: in flight,
-- and its record is one of another release, of version -1 - answer.
local out = {}
for k, request_id in ipairs(request_ids) do
  local r, version = record.load(request_id)
  local answer = version and -1 - version
  if r then
    local phase_text = redis.call('HGET', tag .. ':phase', request_id)
    local lease, run_id = phase.read_lease(phase_text), phase.read_joined(phase_text)
    local list = wait_list.name_of(r, phase_text)
    hand_over(request_id, r, client, phase_text)
    if not lease and deadline.is_past(r) then
      if run_id then stop_run.leave(request_id, run_id) end
      deadline.expire(request_id, r, r.attempts + (run_id and 1 or 0), not run_id)
      if list then withdraw.note(list, r) end
    elseif run_id and not (single_flight.lease_of(run_id)
      and redis.call('ZSCORE', tag .. ':joined:' .. run_id, request_id)) then
      -- A request must not wait for a run that is gone, whatever the server has lost.
      redis.call('ZREM', tag .. ':joined:' .. run_id, request_id)
      answer = requeue.one(request_id, 'requeue', 'requeue') == 'queued' and 1 or 2
    else
      answer = (lease or run_id) and 2 or 1
    end
  end
  out[k] = answer or redis.call('GET', tag .. ':req:' .. request_id) or 0
end
withdraw.trim_all()
publish.all()
counters.write()
return out
