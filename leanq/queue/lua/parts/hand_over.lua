-- parts: record phase
-- Makes a client hear of the end of a request and of its run. It replaces another client, which may be
-- dead. Gateways, whose names begin with '+', wait on behalf of others, so they go on hearing of it. Up to
-- seven of them stay beside the new client, all in one field.
local function hand_over(request_id, r, client, phase_text)
  if string.find(' ' .. r.client .. ' ', ' ' .. client .. ' ', 1, true) then return end
  local names = {client}
  for name in string.gmatch(r.client, '%S+') do
    if string.sub(name, 1, 1) == '+' and #names < 8 then names[#names + 1] = name end
  end
  client = table.concat(names, ' ')
  r.client = client
  local body = string.sub(redis.call('GET', tag .. ':req:' .. request_id), r.body)
  redis.call('SET', tag .. ':req:' .. request_id, record.head(r) .. body)
  local lease = phase.read_lease(phase_text)
  if lease then phase.set_client(request_id, lease, client) end
end
