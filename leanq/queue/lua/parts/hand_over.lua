-- parts: record place
-- Makes a client the one that hears of a request's end, and of its run's.
local function hand_over(request_id, r, client, where)
  if r.client == client then return end
  r.client = client
  local body = string.sub(redis.call('GET', tag .. ':req:' .. request_id), r.body)
  redis.call('SET', tag .. ':req:' .. request_id, record.head(r) .. body)
  local lease = place.read_lease(where)
  if lease then place.lease_to(request_id, lease, client) end
end
