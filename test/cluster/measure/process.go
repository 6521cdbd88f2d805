package measure

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/ebpf-cni/ebpf-cni/test/cluster"
)

// tick is the unit of times in /proc/PID/stat: proc(5), sysconf(_SC_CLK_TCK), which is 100 on all that we build for.
const tick = 10 * time.Millisecond

var errNoAgent = errors.New("no agent runs")

// agentOn is the process of a node's agent, as the real machine numbers it.
func agentOn(node *cluster.Machine) (pid int, err error) {
	var network string
	err = node.Do(func() error {
		network, err = os.Readlink("/proc/thread-self/ns/net")
		return err
	})
	if err != nil {
		return 0, fmt.Errorf("find the agent of %s: %w", node.Name, err)
	}
	names, err := filepath.Glob("/proc/[0-9]*/comm")
	if err != nil {
		return 0, err
	}
	for _, name := range names {
		comm, err := os.ReadFile(name)
		if err != nil || string(comm) != "ebpf-agent\n" {
			continue
		}
		dir := filepath.Dir(name)
		if of, err := os.Readlink(filepath.Join(dir, "ns/net")); err == nil && of == network {
			return strconv.Atoi(filepath.Base(dir))
		}
	}
	return 0, fmt.Errorf("%w on %s", errNoAgent, node.Name)
}

// bornAt is when a process was started, to the kernel's ten milliseconds.
func bornAt(pid int) (time.Time, error) {
	ticks, err := cluster.StartTime(pid)
	if err != nil {
		return time.Time{}, fmt.Errorf("find when the agent was started: %w", err)
	}
	var up unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_BOOTTIME, &up); err != nil {
		return time.Time{}, fmt.Errorf("find when the agent was started: %w", err)
	}
	return time.Now().Add(time.Duration(ticks)*tick - time.Duration(up.Nano())), nil
}

// agentsByPod are the names of the agents' pods.
func agentsByPod(ctx context.Context, c *cluster.Cluster) (map[string]bool, error) {
	client, err := c.Client()
	if err != nil {
		return nil, err
	}
	pods, err := client.CoreV1().Pods(cluster.Namespace).List(ctx, metav1.ListOptions{LabelSelector: cluster.AgentLabel})
	if err != nil {
		return nil, err
	}
	names := map[string]bool{}
	for _, pod := range pods.Items {
		names[pod.Name] = true
	}
	return names, nil
}

// weigh is what a process has resident, and had at most, and what the kernel keeps for the BPF maps that it has open, in bytes.
func weigh(pid int) (map[string]float64, error) {
	status, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
	if err != nil {
		return nil, fmt.Errorf("read the agent's memory: %w", err)
	}
	weight := map[string]float64{"memory": 1024 * field(status, "VmRSS:"), "peak": 1024 * field(status, "VmHWM:")}
	files, err := filepath.Glob(fmt.Sprintf("/proc/%d/fdinfo/*", pid))
	if err != nil {
		return nil, err
	}
	maps := map[float64]float64{}
	for _, file := range files {
		info, err := os.ReadFile(file)
		if err != nil {
			continue // closed meanwhile
		}
		if id := field(info, "map_id:"); id > 0 {
			maps[id] = field(info, "memlock:")
		}
	}
	for _, size := range maps {
		weight["maps"] += size
	}
	for name, bytes := range weight {
		if bytes == 0 {
			return nil, fmt.Errorf("/proc/%d tells nothing of the agent's %s", pid, name)
		}
	}
	if len(maps) == 0 {
		return nil, fmt.Errorf("process %d has no BPF map open", pid)
	}
	return weight, nil
}

// field is the number behind a name in a file of /proc; 0 where there is none.
func field(text []byte, name string) float64 {
	for line := range strings.Lines(string(text)) {
		if fields := strings.Fields(line); len(fields) > 1 && fields[0] == name {
			n, _ := strconv.ParseFloat(fields[1], 64)
			return n
		}
	}
	return 0
}

// cpuTime is what a process has run for, exactly: the kernel's own sums are in ticks of 10 ms. That of threads that have ended is not in it; the
// runtime keeps its own.
func cpuTime(pid int) (total time.Duration, err error) {
	files, err := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/schedstat", pid))
	if err != nil {
		return 0, err
	}
	for _, file := range files {
		raw, err := os.ReadFile(file)
		if err != nil {
			continue // ended meanwhile
		}
		ran, _, _ := strings.Cut(string(raw), " ")
		ns, err := strconv.ParseInt(ran, 10, 64)
		if err != nil {
			return 0, fmt.Errorf("read %s: %w", file, err)
		}
		total += time.Duration(ns)
	}
	if total == 0 {
		return 0, fmt.Errorf("process %d tells nothing of its CPU time", pid)
	}
	return total, nil
}
