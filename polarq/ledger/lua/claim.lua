-- KEYS task, rollout, leases, waiting, events, tasks
-- ARGV rollout_id, node_id, lease_ms, job_id, events_max, task_id, nonce
local task, rollout, leases, waiting, events, tasks = KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5], KEYS[6]
local rollout_id, node_id, lease, job_id, max, task_id = ARGV[1], ARGV[2], tonumber(ARGV[3]), ARGV[4], ARGV[5], ARGV[6]
local r = redis.call('HMGET', rollout, 'state', 'lease_ms', 'owner', 'queued_ms', 'nonce', 'attempt', 'token',
  'claimed_ms')
local state = r[1]
if not state then return {'unknown'} end
if ENDS[state] then return {'done', state} end
local now = now_ms()
if r[5] == ARGV[7] and state ~= 'queued' then
  -- The same claim once more: the answer to the first got lost on its way.
  return {'granted', tonumber(r[6]), tonumber(r[7]), tonumber(r[8]) - tonumber(r[4]),
    redis.call('HGET', task, 'request'), tonumber(r[8])}
end
local run = redis.call('HGET', task, 'run_id')
if redis.call('SISMEMBER', beside(leases, 'runs-paused'), run) == 1 then return {'held', 'run ' .. run .. ' is paused'} end
if state ~= 'queued' then
  if tonumber(r[2] or 0) > now then return {'busy', r[3]} end
  -- Its lease ran out and nobody has given it back yet: this claim is the next attempt.
  note_loss(rollout, r[3], state, r[6], 'lease_expired', now)
elseif not may(state, 'preparing') then
  return {'busy', ''}
else
  redis.call('HINCRBY', task, 'queued', -1)
end
local attempt = redis.call('HINCRBY', rollout, 'attempt', 1)
local token = redis.call('HINCRBY', rollout, 'token', 1)
redis.call('HSET', rollout, 'state', 'preparing', 'owner', node_id, 'lease_ms', now + lease, 'claimed_ms', now,
  'stage_ms', now, 'job_id', job_id, 'nonce', ARGV[7])
be_held(leases, task, rollout_id, now + lease)
touch(task, tasks, task_id, now)
emit(events, max, 'session.state_changed', {task_id = task_id, session_id = rollout_id, status = 'preparing',
  node_id = node_id, attempt = attempt})
return {'granted', attempt, token, now - tonumber(r[4]), redis.call('HGET', task, 'request'), now}
