-- One call renews all leases of a worker.
-- KEYS leases, rollout...
-- ARGV lease_ms, then per rollout: rollout_id, token. Answers per rollout: ok, cancel, or lost.
local leases, lease = KEYS[1], tonumber(ARGV[1])
local now = now_ms()
local answers = {}
for i = 2, #KEYS do
  local id, token = ARGV[2 * (i - 1)], ARGV[2 * (i - 1) + 1]
  local r = redis.pcall('HMGET', KEYS[i], 'state', 'token', 'cancel')
  -- One record that somebody damaged costs its own lease, and not all of a worker's.
  if r.err then redis.call('ZREM', leases, id) end
  if not r[1] or ENDS[r[1]] or r[1] == 'queued' or r[2] ~= token then
    answers[i - 1] = 'lost'
  else
    redis.call('HSET', KEYS[i], 'lease_ms', now + lease)
    redis.call('ZADD', leases, now + lease, id)
    answers[i - 1] = r[3] == '1' and 'cancel' or 'ok'
  end
end
return answers
