package cluster

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"time"

	core "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// greetPort is where the world waits for the first packets of pods.
const greetPort = 7

// FirstPacket runs a pod on a node and returns how long after its creation was asked for the first packet that it sent
// arrived in the world. Until then the API server, the kubelet, containerd, the plugin and the dataplane have done their parts.
func (c *Cluster) FirstPacket(ctx context.Context, node *Machine, name string) (took time.Duration, err error) {
	ctx, cancel := context.WithTimeout(ctx, podLimit)
	defer cancel()
	listener, err := c.listenInWorld()
	if err != nil {
		return 0, err
	}
	defer listener.Close()
	stop := context.AfterFunc(ctx, func() { listener.Close() })
	defer stop()
	client, err := c.Client()
	if err != nil {
		return 0, err
	}
	started := time.Now()
	if _, err := client.CoreV1().Pods(metav1.NamespaceDefault).Create(ctx, greeter(name, node), metav1.CreateOptions{}); err != nil {
		return 0, fmt.Errorf("add pod %s: %w", name, err)
	}
	defer func() {
		err = errors.Join(err, c.DeletePods(context.WithoutCancel(ctx), &Pod{Name: name}))
	}()
	buffer := make([]byte, 256)
	for {
		n, from, err := listener.ReadFromUDPAddrPort(buffer)
		if err != nil {
			return 0, fmt.Errorf("wait for the first packet of pod %s: %w", name, errors.Join(err, context.Cause(ctx)))
		}
		took := time.Since(started)
		if _, err := listener.WriteToUDPAddrPort([]byte{0}, from); err != nil {
			return 0, fmt.Errorf("answer pod %s: %w", name, err)
		}
		if string(buffer[:n]) == name {
			return took, nil
		}
	}
}

// listenInWorld opens a socket of the world's.
func (c *Cluster) listenInWorld() (listener *net.UDPConn, err error) {
	err = c.Fabric.Do(func() error {
		listener, err = net.ListenUDP("udp", net.UDPAddrFromAddrPort(netip.AddrPortFrom(WorldAddr, greetPort)))
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("listen in the world: %w", err)
	}
	return listener, nil
}

func greeter(name string, node *Machine) *core.Pod {
	grace := int64(1)
	return &core.Pod{
		ObjectMeta: metav1.ObjectMeta{Name: name},
		Spec: core.PodSpec{
			NodeName: node.Name, TerminationGracePeriodSeconds: &grace,
			Containers: []core.Container{{
				Name: "greet", Image: greetImage, ImagePullPolicy: core.PullNever,
				Args: []string{netip.AddrPortFrom(WorldAddr, greetPort).String(), name},
			}},
		},
	}
}
