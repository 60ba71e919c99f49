-- parts: clock publish counters
-- Requests that missed their deadline in the queue.
local expire = {}

function expire.is_late(r) return r.deadline > 0 and now > r.deadline end

-- Ends such a request, after so many attempts; `waited`: it waited in a line.
function expire.finish(request_id, r, attempts, waited)
  publish.finish(request_id, r.client, publish.verdict('expired', attempts, now - r.submitted))
  counters.ended(r.environment, 'expired', 1)
  if waited then counters.add('waiting:' .. r.environment, -1) end
end
