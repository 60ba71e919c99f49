#!lua flags=no-writes
-- parts: clock record phase single_flight is_isolated
-- reconcile: compares the requests that a worker holds (`request_ids`) with its processing list, after an
-- answer got lost on the wire. It gives the worker unknown requests again, with the tokens that they have.
-- Answers request_ids, records, isolated: unknown requests, as claim gives them out; tokens: their tokens;
-- lost: ids of requests that are no longer the worker's; now_ms.
local processing, held, lost = tag .. ':processing:' .. worker, {}, {}
local unknown, records, tokens, all_isolated = {}, {}, {}, {}
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
      -- The record may be a joined request's, which has fewer attempts. If the run may be shared, its lease
      -- says whether it is isolated.
      local isolated = lease.isolated ~= ''
      if lease.digest == '' then isolated = is_isolated(r.attempts) end
      local n = #unknown + 1
      unknown[n], records[n], tokens[n] = request_id, text, lease.token
      if isolated then all_isolated[#all_isolated + 1] = n end
    end
  end
end
return answer({request_ids = unknown, records = records, tokens = tokens, isolated = all_isolated, lost = lost,
  now_ms = now})
