#!lua flags=allow-oom
-- lookup: what became of requests, for a client that waits for them; attaches them to its inbox.
-- ARGV: client, time-to-live of replies (ms), most attempts, the rids
-- Returns per rid: the reply, or 1 queued, 2 leased or attached to another, 0 unknown.
local client, ttl, most = ARGV[1], ARGV[2], tonumber(ARGV[3])
local now, told, out = now_ms(), {}, {}
for i = 4, #ARGV do
  local rid = ARGV[i]
  local r, answer = record(rid), nil
  if r then
    local place = call('HGET', WHERE, rid)
    local run, leader = read_lease(place), read_attachment(place)
    hand_over(rid, r, client, place)
    r[CLIENT] = client
    if not run and is_late(r, now) then
      if leader then detach(rid, leader) end
      expire(rid, r, r[ATTEMPTS] + (leader and 1 or 0), now, ttl, told, leader)
    elseif leader and not is_follower(rid, leader) then
      -- Nobody waits for a run that is none, whatever the server has lost.
      call('ZREM', P .. ':with:' .. leader, rid)
      answer = put_back(rid, false, most, now, ttl, told) == 'queued' and 1 or 2
    else
      answer = (run or leader) and 2 or 1
    end
  end
  out[#out + 1] = answer or call('GET', REQ .. rid) or 0
end
tell(told, ttl)
return out
