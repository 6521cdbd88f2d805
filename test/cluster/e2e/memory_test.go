package e2e

import (
	"context"
	"fmt"
	"strings"
	"testing"

	core "k8s.io/api/core/v1"

	"github.com/ebpf-cni/ebpf-cni/test/cluster"
)

// squeeze lets a container have little more memory than it has, makes its process the first choice of the kernel, and
// has another one in its cgroup take all there is.
const squeeze = `
root=/sys/fs/cgroup
if [ -e $root/cgroup.controllers ]; then
	used=memory.current limit=memory.max
else
	root=$root/memory used=memory.usage_in_bytes limit=memory.limit_in_bytes
fi
group=$(find $root -type d -name %s) && read pid < $group/cgroup.procs || exit 1
echo 1000 > /proc/$pid/oom_score_adj || exit 1
echo $(($(cat $group/$used) + 8388608)) > $group/$limit || exit 1
echo $$ > $group/cgroup.procs || exit 1
exec tail /dev/zero
`

// outOfMemory is what the kubelet says of a container that the kernel has ended for want of memory.
const outOfMemory = "OOMKilled"

// exhaust has the kernel end a node's agent for want of memory.
func exhaust(t *testing.T, s *standing, node *cluster.Machine) {
	t.Helper()
	before := agentPod(t, s, node).Status.ContainerStatuses[0]
	script := fmt.Sprintf(squeeze, strings.TrimPrefix(before.ContainerID, "containerd://"))
	// The script ends by the kernel's hand too: that it could not do its work is the only failure.
	out, err := node.Run(within(t, stepLimit), "sh", "-c", script)
	if err == nil || strings.Contains(err.Error(), "exit status 1:") {
		t.Fatalf("nothing ran out of memory: %v\n%s", err, out)
	}
	after := restarted(t, s, node, before)
	if ended := after.LastTerminationState.Terminated; ended == nil || ended.Reason != outOfMemory {
		t.Errorf("the agent ended by %+v, want %s", ended, outOfMemory)
	}
}

// restarted waits until the kubelet has started the agent again, and it is ready.
func restarted(t *testing.T, s *standing, node *cluster.Machine, before core.ContainerStatus) (after core.ContainerStatus) {
	t.Helper()
	err := cluster.Poll(within(t, stepLimit), "the agent of "+node.Name+" is back", func(context.Context) error {
		after = agentPod(t, s, node).Status.ContainerStatuses[0]
		if after.RestartCount <= before.RestartCount || !after.Ready {
			return fmt.Errorf("restarts %d, then %d, ready %v", before.RestartCount, after.RestartCount, after.Ready)
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return after
}
