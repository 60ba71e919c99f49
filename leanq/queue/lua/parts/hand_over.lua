-- parts: record phase
-- Makes a client the one that hears of a request's end, and of its run's.
local function hand_over(request_id, r, client, phase_text)
  if r.client == client then return end
  r.client = client
  local body = string.sub(redis.call('GET', tag .. ':req:' .. request_id), r.body)
  redis.call('SET', tag .. ':req:' .. request_id, record.head(r) .. body)
  local lease = phase.read_lease(phase_text)
  if lease then phase.set_client(request_id, lease, client) end
end
