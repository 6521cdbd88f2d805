package agent

import (
	"fmt"
	"maps"
	"slices"

	"github.com/ebpf-cni/ebpf-cni/pkg/endpoint"
	"github.com/ebpf-cni/ebpf-cni/pkg/observe"
)

// isNear says whether so many of what there is room for are so many that people should know before it is used up.
func isNear(used, room int) bool { return used > 0 && used*5 >= room*4 }

// hostPortShares finds shares of host ports that are nearly used up: of a namespace, and of the whole node.
func (c circumstances) hostPortShares() (found []observe.NetworkProblem) {
	used, room := len(c.hostPorts.entries), c.hostPorts.room
	if room == 0 {
		return nil
	}
	const remedy = "delete pods that have many host ports (ebpfctl dump hostports), or run them on other nodes"
	if isNear(used, room) {
		found = append(found, observe.NetworkProblem{
			Reason: hostPortShare,
			Text: fmt.Sprintf("%d of the %d host ports of this node are in use (one in both families counts twice): a new pod that asks for more than %d is refused",
				used, room, endpoint.HostPortShare(room-used)),
			Remedy: remedy,
		})
	}
	pods, held := c.podsByLink(), map[string]int{}
	for _, v := range c.hostPorts.entries {
		if namespace := endpoint.NamespaceOf(pods[v.Ifindex]); namespace != "" {
			held[namespace]++
		}
	}
	for _, namespace := range slices.Sorted(maps.Keys(held)) {
		if share := endpoint.HostPortShare(room - used + held[namespace]); isNear(held[namespace], share) {
			found = append(found, observe.NetworkProblem{
				Reason: hostPortShare, About: namespace,
				Text:   fmt.Sprintf("pods of namespace %s have %d of the %d host ports that it may have on this node (one in both families counts twice): its next pods may be refused", namespace, held[namespace], share),
				Remedy: remedy,
			})
		}
	}
	return found
}
