#!lua flags=allow-oom
-- lookup: what became of requests, for a client that waits for them; attaches them to its inbox.
-- ARGV: client, time-to-live of replies (ms), most attempts, the request ids
-- Returns per request id: the reply, or 1 queued, 2 leased or attached to another, 0 unknown.
local client, ttl, most = ARGV[1], ARGV[2], tonumber(ARGV[3])
local now, told, out = now_ms(), {}, {}
for i = 4, #ARGV do
  local request_id = ARGV[i]
  local r, answer = record(request_id), nil
  if r then
    local place = call('HGET', WHERE, request_id)
    local run, leader = read_lease(place), read_attachment(place)
    hand_over(request_id, r, client, place)
    r[CLIENT] = client
    if not run and is_late(r, now) then
      if leader then detach(request_id, leader) end
      expire(request_id, r, r[ATTEMPTS] + (leader and 1 or 0), now, ttl, told, leader)
    elseif leader and not is_follower(request_id, leader) then
      -- Nobody waits for a run that is none, whatever the server has lost.
      call('ZREM', P .. ':with:' .. leader, request_id)
      answer = put_back(request_id, false, most, now, ttl, told) == 'queued' and 1 or 2
    else
      answer = (run or leader) and 2 or 1
    end
  end
  out[#out + 1] = answer or call('GET', REQ .. request_id) or 0
end
tell(told, ttl)
return out
