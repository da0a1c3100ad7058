-- In front of the scripts that end a claimed rollout whose worker says nothing of it any more.

-- The summary of one that was told to stop: `why` is who told it.
local function stopped_summary(task, why, json)
  local summary = cjson.decode(json)
  if why == 'early_stop' then
    local t = redis.call('HMGET', task, 'early', 'early_usable', 'early_ms')
    summary.outcome.reason = 'early_stop'
    summary.early_stop = {min_usable = tonumber(t[1]), usable = tonumber(t[2]), elapsed_ms = tonumber(t[3])}
  end
  return cjson.encode(summary)
end

local function end_held(events, max, task, rollout, task_id, id, owner, to, summary, reason, now)
  redis.call('HSET', rollout, 'state', to, 'summary', summary, 'ended_ms', now, 'released_by', owner)
  redis.call('HDEL', rollout, 'lease_ms')
  be_over(events, task, id)
  redis.call('HINCRBY', task, to, 1)
  emit(events, max, 'session.state_changed', {task_id = task_id, session_id = id, status = to, node_id = owner,
    reward = cjson.null, reason = reason})
end
