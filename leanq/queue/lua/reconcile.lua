#!lua flags=no-writes
-- parts: clock record phase single_flight is_isolated
-- reconcile: compares what a worker holds (`request_ids`) with its processing list, after an answer got
-- lost on the wire. What it does not know is handed to it again, with the token it already has.
-- Answers jobs: per unknown request what claim gives out, and the token; lost: request ids that are no
-- longer its own; now_ms.
local processing, held, jobs, lost = tag .. ':processing:' .. worker, {}, {}, {}
for _, request_id in ipairs(request_ids) do
  held[request_id] = true
  if not redis.call('ZSCORE', processing, request_id) then lost[#lost + 1] = request_id end
end
for _, request_id in ipairs(redis.call('ZRANGE', processing, 0, -1)) do
  local lease = not held[request_id] and single_flight.lease_of(request_id)
  if lease then
    local text = redis.call('GET', tag .. ':req:' .. single_flight.with_record(request_id, lease))
    local r = record.read(text)
    if r then
      -- The record may be that of a request which has joined, with fewer attempts; a lease says of
      -- what may be shared whether it is isolated.
      local isolated = lease.isolated ~= ''
      if lease.digest == '' then isolated = is_isolated(r.attempts) end
      jobs[#jobs + 1] = {request_id, isolated and 1 or 0, text, lease.token}
    end
  end
end
return answer({jobs = jobs, lost = lost, now_ms = now})
