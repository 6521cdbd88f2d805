// Command greet tells a listener that the pod it runs in has a network: greet ADDRESS NAME sends NAME in UDP datagrams, one
// a millisecond, until it gets an answer. Then it waits to be ended.
package main

import (
	"fmt"
	"net"
	"os"
	"os/signal"
	"syscall"
	"time"
)

func main() {
	ended := make(chan os.Signal, 1)
	signal.Notify(ended, syscall.SIGINT, syscall.SIGTERM)
	if len(os.Args) != 3 {
		fmt.Fprintln(os.Stderr, "usage: greet ADDRESS NAME")
		os.Exit(2)
	}
	for !greet(os.Args[1], os.Args[2]) {
		select {
		case <-ended:
			return
		default:
		}
	}
	<-ended
}

// greet sends one datagram and says whether an answer came within a millisecond.
func greet(address, name string) bool {
	conn, err := net.Dial("udp", address)
	if err != nil {
		time.Sleep(time.Millisecond)
		return false
	}
	defer conn.Close()
	if _, err := conn.Write([]byte(name)); err != nil {
		time.Sleep(time.Millisecond)
		return false
	}
	if err := conn.SetReadDeadline(time.Now().Add(time.Millisecond)); err != nil {
		return false
	}
	_, err = conn.Read(make([]byte, 1))
	return err == nil
}
