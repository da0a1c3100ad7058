-- Gives a claimed rollout back to the queue; one that was told to stop ends here. What the drain gave back does not count
-- as an attempt.
-- KEYS task, rollout, leases, waiting, events, tasks
-- ARGV rollout_id, token, counted, events_max, task_id, reason, stem, keep_s, summary of a cancel
local task, rollout, leases, waiting, events, tasks = KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5], KEYS[6]
local r = redis.call('HMGET', rollout, 'state', 'token', 'owner', 'cancel', 'why')
if not r[1] or r[2] ~= ARGV[2] or not may(r[1], 'queued') then return 'lost' end
local now = now_ms()
-- A new token, so that nothing the old owner still holds can commit.
redis.call('HINCRBY', rollout, 'token', 1)
shut(leases, rollout)
touch(task, tasks, ARGV[5], now)
if r[4] == '1' then
  local said = stopped_summary(task, r[5], ARGV[9])
  end_held(events, ARGV[4], task, rollout, ARGV[5], ARGV[1], r[3], 'cancelled', said, ARGV[6], now)
  finish(task, events, ARGV[4], ARGV[7], ARGV[5], ARGV[8], now)
  return 'cancelled'
end
if ARGV[3] ~= '1' then redis.call('HINCRBY', rollout, 'attempt', -1) end
redis.call('HSET', rollout, 'state', 'queued', 'queued_ms', now, 'released_by', r[3])
redis.call('HDEL', rollout, 'owner', 'lease_ms', 'job_id', 'incarnation')
wait_in_line(waiting, task, ARGV[1], now)
redis.call('HINCRBY', task, 'queued', 1)
emit(events, ARGV[4], 'session.state_changed', {task_id = ARGV[5], session_id = ARGV[1], status = 'queued',
  released_by = r[3], reason = ARGV[6]})
return 'queued'
