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
	go greet(os.Args[1], os.Args[2])
	<-ended
}

// greet sends until an answer comes. The socket stays, so that an answer counts however late it is.
func greet(address, name string) {
	const every = time.Millisecond
	conn, err := net.Dial("udp", address)
	for ; err != nil; conn, err = net.Dial("udp", address) {
		time.Sleep(every)
	}
	defer conn.Close()
	for {
		next := time.Now().Add(every)
		if _, err := conn.Write([]byte(name)); err == nil && answered(conn, next) {
			return
		}
		time.Sleep(time.Until(next))
	}
}

func answered(conn net.Conn, until time.Time) bool {
	if err := conn.SetReadDeadline(until); err != nil {
		return false
	}
	_, err := conn.Read(make([]byte, 1))
	return err == nil
}
