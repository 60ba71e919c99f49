#!lua flags=allow-oom
-- parts: clock record phase wait_list publish counters single_flight stop_run withdraw
-- cancel: the client withdraws requests.
-- Returns per request id: 1 cancelled, 0 too late or unknown.
local out = {}
for k, request_id in ipairs(request_ids) do
  local r = record.load(request_id)
  out[k] = r and 1 or 0
  if r then
    local phase_text = redis.call('HGET', tag .. ':phase', request_id)
    local lease, run_id = phase.read_lease(phase_text), phase.read_joined(phase_text)
    local list = wait_list.name_of(r, phase_text)
    local attempts = r.attempts + ((lease or run_id) and 1 or 0)
    local reply = publish.verdict(r, 'cancelled', 'withdrawn', attempts, now - r.submitted)
    if lease and lease.digest ~= '' and redis.call('ZCARD', tag .. ':joined:' .. request_id) > 0 then
      -- It runs on for the requests that joined it.
      phase.set_client(request_id, lease, '')
      publish.reply(request_id, r.client, reply)
    else
      if lease then stop_run.stop(request_id, lease)
      elseif run_id then stop_run.leave(request_id, run_id)
      else counters.add('waiting:' .. r.environment, -1) end
      publish.finish(request_id, r, reply)
      if list then withdraw.note(list, r) end
    end
    counters.ended(r.environment, 'cancelled', 'withdrawn', 1)
  end
end
withdraw.trim_all()
publish.all()
counters.write()
return out
